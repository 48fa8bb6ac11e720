package nodes

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// registrations notes which plugins were registered with their kubelets for the first time
// just now, while this controller leads: nothing of such a node has been published that a
// kubelet could have deleted since, and its plugin need not be asked (ADR 63).
type registrations struct {
	clock clock.PassiveClock
	// leads is closed once this controller leads. One that doesn't may miss that another
	// publishes, and that the kubelet deletes that.
	leads <-chan struct{}

	mu    sync.Mutex
	first map[string]registration // by node
}

// registration is the first one that an inventory has reported.
type registration struct {
	inventory types.UID
	seen      time.Time
}

func newRegistrations(c clock.PassiveClock, leads <-chan struct{}) *registrations {
	return &registrations{clock: c, leads: leads, first: make(map[string]registration)}
}

// saw notes a change of an inventory; before is nil for one that was created. The time that
// the plugin reports has to be near, too: events are late after a broken connection, and
// the inventory of a plugin that was registered long ago may have been created again.
func (r *registrations) saw(before, inv *v1alpha1.GPUInventory) {
	select {
	case <-r.leads:
	default:
		return
	}
	if inv.Status.RegisteredAt.IsZero() || before != nil && before.UID == inv.UID && !before.Status.RegisteredAt.IsZero() {
		return
	}
	now := r.clock.Now()
	if now.Sub(inv.Status.RegisteredAt.Time).Abs() > answerWithin {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.first[inv.Name] = registration{inv.UID, now}
}

// justNow reports whether the inventory has reported its first registration within
// answerWithin, and nothing has been published since.
func (r *registrations) justNow(inv *v1alpha1.GPUInventory) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	first, ok := r.first[inv.Name]
	return ok && first.inventory == inv.UID && r.clock.Since(first.seen) <= answerWithin
}

func (r *registrations) forget(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.first, node)
}
