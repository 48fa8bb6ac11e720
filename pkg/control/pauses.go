package control

import (
	"sync"
	"time"

	"k8s.io/utils/clock"
)

// pauses keeps a growing pause between attempts for each node: the first lasts
// first, and each next one twice as long as the last, up to longest. An attempt that
// comes more than twice longest after the last one counts as the first.
type pauses struct {
	clock          clock.PassiveClock
	first, longest time.Duration

	mu   sync.Mutex
	last map[string]pause // by node
}

type pause struct {
	begun  time.Time
	length time.Duration
}

func newPauses(c clock.PassiveClock, first, longest time.Duration) *pauses {
	return &pauses{clock: c, first: first, longest: longest, last: make(map[string]pause)}
}

// begin starts the next pause of a node.
func (p *pauses) begin(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, length := p.clock.Now(), p.first
	if last, ok := p.last[node]; ok && now.Sub(last.begun) <= 2*p.longest {
		length = min(2*last.length, p.longest)
	}
	p.last[node] = pause{begun: now, length: length}
}

// left returns how long the pause of a node lasts from now; 0 where it is over.
func (p *pauses) left(node string) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, ok := p.last[node]
	if !ok {
		return 0
	}
	return max(0, last.length-p.clock.Since(last.begun))
}

// forget ends the pause of a node, and makes its next one the first.
func (p *pauses) forget(node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.last, node)
}
