package nvml

import "time"

// SetLimits has calls for a GPU count as late after the given time.
func (s *Session) SetLimits(all time.Duration) {
	s.limits = limits{identify: all, read: all, change: all}
}

// CallsUnderway is how many calls have not returned.
func (s *Session) CallsUnderway() int {
	s.guard.mu.Lock()
	defer s.guard.mu.Unlock()
	n := 0
	for _, calls := range s.guard.calls {
		n += len(calls)
	}
	return n
}
