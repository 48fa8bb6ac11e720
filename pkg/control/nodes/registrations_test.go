package nodes

import (
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// registers reports that the kubelet registered the plugin at a time, and passes on the
// event, from an inventory that is given.
func (s *fixture) registers(at time.Time, before *v1alpha1.GPUInventory) {
	s.t.Helper()
	inv := s.inventory()
	inv.Status.RegisteredAt = new(metav1.NewMicroTime(at))
	if err := s.api.Status().Update(s.t.Context(), inv); err != nil {
		s.t.Fatal(err)
	}
	s.nodes.registrations.saw(before, inv)
}

// unregistered reports an inventory whose plugin the kubelet has not registered yet.
func (s *fixture) unregistered() *v1alpha1.GPUInventory {
	s.t.Helper()
	s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.RegisteredAt = nil })
	return s.inventory()
}

func TestFirstRegistrationNeedsNoAnswer(t *testing.T) {
	s := newFixture(t)
	s.registers(s.clock.Now(), s.unregistered())
	s.mustReconcile()
	s.mustHave(1)
	s.mustHaveAsked(0)

	s.store.slices = nil // by the kubelet
	s.mustReconcile()
	s.mustHave(0)
	s.mustHaveAsked(1)
	s.publishAfterAnswer()
}

// TestRegistrationsThatProveNothing lists registrations after which the plugin may be gone:
// it is asked.
func TestRegistrationsThatProveNothing(t *testing.T) {
	for name, register := range map[string]func(s *fixture){
		"while another controller led": func(s *fixture) {
			s.nodes.registrations.leads = make(chan struct{})
			s.registers(s.clock.Now(), s.unregistered())
		},
		"not the first": func(s *fixture) { s.registers(s.clock.Now(), s.inventory()) },
		"reported late": func(s *fixture) { s.registers(s.clock.Now().Add(-answerWithin-time.Second), s.unregistered()) },
		"in the future": func(s *fixture) { s.registers(s.clock.Now().Add(answerWithin+time.Second), s.unregistered()) },
		"processed late": func(s *fixture) {
			s.registers(s.clock.Now(), s.unregistered())
			s.clock.Step(answerWithin + time.Second)
		},
		"of an inventory that is gone": func(s *fixture) {
			s.registers(s.clock.Now(), s.unregistered())
			s.report(func(inv *v1alpha1.GPUInventory) { inv.UID = "second" })
		},
		"before an attempt that failed": func(s *fixture) {
			s.registers(s.clock.Now(), s.unregistered())
			s.mustBeFull()
			s.clock.Step(undone.MaxRetryDelay / 2)
		},
		"of a node with slices": func(s *fixture) {
			s.registers(s.clock.Now(), s.unregistered())
			s.store.slices = []*resourceapi.ResourceSlice{{Spec: resourceapi.ResourceSliceSpec{Pool: resourceapi.ResourcePool{ResourceSliceCount: 2}}}}
		},
		"of a node with slices of another driver": func(s *fixture) {
			s.registers(s.clock.Now(), s.unregistered())
			s.store.foreign = append(s.store.foreign, foreignSlice())
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			register(s)
			s.mustReconcile()
			s.mustHaveAsked(1)
			s.publishAfterAnswer()
		})
	}
}

// TestInventoryEvents checks which events count as a first registration, and that all
// enqueue the node.
func TestInventoryEvents(t *testing.T) {
	s := newFixture(t)
	bare := s.unregistered()
	registered := bare.DeepCopy()
	registered.Status.RegisteredAt = new(metav1.NewMicroTime(s.clock.Now()))
	again := registered.DeepCopy()
	again.UID = "second"
	for name, tc := range map[string]struct {
		event func(*inventoryEvents, inventoryQueue)
		now   *v1alpha1.GPUInventory
		want  bool
	}{
		"registered": {func(h *inventoryEvents, q inventoryQueue) {
			h.Update(t.Context(), event.TypedUpdateEvent[*v1alpha1.GPUInventory]{ObjectOld: bare, ObjectNew: registered}, q)
		}, registered, true},
		"created again": {func(h *inventoryEvents, q inventoryQueue) {
			h.Update(t.Context(), event.TypedUpdateEvent[*v1alpha1.GPUInventory]{ObjectOld: registered, ObjectNew: again}, q)
		}, again, true},
		"created": {func(h *inventoryEvents, q inventoryQueue) {
			h.Create(t.Context(), event.TypedCreateEvent[*v1alpha1.GPUInventory]{Object: registered}, q)
		}, registered, true},
		"there at the start": {func(h *inventoryEvents, q inventoryQueue) {
			h.Create(t.Context(), event.TypedCreateEvent[*v1alpha1.GPUInventory]{Object: registered, IsInInitialList: true}, q)
		}, registered, false},
		"not registered": {func(h *inventoryEvents, q inventoryQueue) {
			h.Create(t.Context(), event.TypedCreateEvent[*v1alpha1.GPUInventory]{Object: bare}, q)
		}, bare, false},
	} {
		t.Run(name, func(t *testing.T) {
			queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
			defer queue.ShutDown()
			r := newRegistrations(s.clock, s.nodes.registrations.leads)
			tc.event(&inventoryEvents{registrations: r}, queue)
			if got := r.justNow(tc.now); got != tc.want || queue.Len() != 1 {
				t.Errorf("registered just now: %t, want %t; %d nodes enqueued, want 1", got, tc.want, queue.Len())
			}
		})
	}
}
