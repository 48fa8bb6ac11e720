package nodes

import (
	"sync"
	"time"

	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/utils/clock"
)

// pauses keeps a growing pause between attempts for each node. An attempt that comes more
// than twice the longest pause after the last one counts as the first.
type pauses struct {
	*flowcontrol.Backoff

	mu  sync.Mutex
	end map[string]time.Time // by node; a Backoff doesn't have it
}

// newPauses returns pauses that grow from first to longest.
func newPauses(c clock.Clock, first, longest time.Duration) *pauses {
	return &pauses{Backoff: flowcontrol.NewFakeBackOff(first, longest, c), end: map[string]time.Time{}}
}

// begin starts the next pause of a node.
func (p *pauses) begin(node string) {
	now := p.Clock.Now()
	p.Next(node, now)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end[node] = now.Add(p.Get(node))
}

// left returns how long the pause of a node lasts from now; 0 where it is over.
func (p *pauses) left(node string) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(0, p.end[node].Sub(p.Clock.Now()))
}

// forget ends the pause of a node, and makes its next one the first.
func (p *pauses) forget(node string) {
	p.Reset(node)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.end, node)
}
