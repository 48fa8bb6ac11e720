package rank

import "time"

// Pace keeps ranks from changing to and fro: a lower rank is due at once, because the node is in
// use and should fill up; a higher one only when it has been wanted for a pause, because the next
// pod may take the place of one that has ended.
type Pace struct {
	Pause time.Duration
	since map[string]time.Time // a higher rank has been wanted, by node
}

// Due returns whether the node is to be given the rank now, or else after which time; 0 if it has
// the rank. Call Forget when it has been given it.
func (p *Pace) Due(node string, has, want Rank, now time.Time) (due bool, after time.Duration) {
	if has == want || want.Relaxes(has) {
		delete(p.since, node)
		return has != want, 0
	}
	since, waits := p.since[node]
	if !waits {
		if p.since == nil {
			p.since = make(map[string]time.Time)
		}
		p.since[node], since = now, now
	}
	left := p.Pause - now.Sub(since)
	return left <= 0, max(0, left)
}

// Forget forgets which rank a node waits for: it has it, or the node is gone.
func (p *Pace) Forget(node string) { delete(p.since, node) }
