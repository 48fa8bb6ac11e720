package report

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// gatherFor is how long a change of the facts waits for others.
	gatherFor = 100 * time.Millisecond
	// gatherAtMost is the same where one change follows the other.
	gatherAtMost = 400 * time.Millisecond
)

// gather returns when the facts have not changed for gatherFor, but after gatherAtMost
// at the latest: GPUs often fail together, and each write of the object makes the
// controller write all of the node's slices. It returns at once where somebody waits for
// the write.
func (r *Reporter) gather(ctx context.Context) {
	longest, quiet := time.After(gatherAtMost), time.After(gatherFor)
	for {
		known, factsChanged := r.facts.State()
		r.mu.Lock()
		awaited, changed := r.awaited(registeredAt(known)), r.mu.Changed()
		r.mu.Unlock()
		if awaited {
			return
		}
		select {
		case <-factsChanged:
			quiet = time.After(gatherFor)
		case <-changed:
		case <-quiet:
			return
		case <-longest:
			return
		case <-ctx.Done():
			return
		}
	}
}

// awaited reports whether the next write is awaited: by the plugin's start, by the
// controller, or because of a double allocation. It needs the lock.
func (r *Reporter) awaited(registered *metav1.MicroTime) bool {
	if !r.reported || r.inventory == nil || r.doubleAllocation != nil {
		return true
	}
	inv := r.inventory
	return registered != nil && (!registered.Equal(inv.Status.RegisteredAt) || inv.Spec.PublishRequest != inv.Status.PublishResponse)
}
