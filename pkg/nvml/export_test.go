package nvml

import "time"

// SetLimits sets the time after which calls for a GPU count as late.
func (s *Session) SetLimits(all time.Duration) {
	s.limits = limits{initialize: all, identify: all, read: all, change: all}
}

// SetReadLimit sets the time after which calls that only read count as late.
func (s *Session) SetReadLimit(d time.Duration) { s.limits.identify, s.limits.read = d, d }

// SetLimits has calls count as late after the given time.
func (o *Opener) SetLimits(all time.Duration) {
	o.limits = limits{initialize: all, identify: all, read: all, change: all}
}

// CallsUnderway returns the number of calls that have not returned.
func (s *Session) CallsUnderway() int { return s.guard.underway() }

// CallsUnderway is how many calls of all sessions have not returned.
func (o *Opener) CallsUnderway() int { return o.guard.underway() }

func (g *guard) underway() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for _, calls := range g.calls {
		n += len(calls)
	}
	return n
}
