package nodes

import (
	"errors"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
)

// foreignSlice is one as NVIDIA's driver publishes it.
func foreignSlice() *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "n-gpu.nvidia.com-x7k2p", UID: "theirs"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: new("n"), Pool: resourceapi.ResourcePool{Name: "n", Generation: 7, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0"}},
		},
	}
}

func (s *fixture) condition(kind string) metav1.Condition {
	s.t.Helper()
	if c := meta.FindStatusCondition(s.inventory().Status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

func (s *fixture) mustHaveForeign(n int) {
	s.t.Helper()
	if len(s.store.foreign) != n {
		s.t.Fatalf("%d foreign slices are there, want %d", len(s.store.foreign), n)
	}
}

// The other driver was uninstalled, and this one installed before the kubelet
// deleted the other's slices: nothing else will delete them.
func TestWhatAnotherDriverLeftGoes(t *testing.T) {
	s := newFixture(t)
	s.store.foreign = append(s.store.foreign, foreignSlice())
	s.mustReconcile()
	s.mustHaveForeign(1) // the plugin hasn't answered
	s.mustHave(0)
	s.pluginAnswers()
	s.mustReconcile()
	s.mustHaveForeign(0)
	s.mustHave(1)
	if c := s.condition(v1alpha1.ConditionConflicting); c.Status == metav1.ConditionTrue {
		t.Errorf("got %+v", c)
	}
}

// Slices that couldn't be deleted are no sign of a driver that runs.
func TestForeignSlicesThatCannotBeDeleted(t *testing.T) {
	s := newFixture(t)
	s.store.foreign = append(s.store.foreign, foreignSlice())
	s.store.stuck = errors.New("the server is busy")
	s.mustReconcile()
	s.pluginAnswers()
	if err := s.reconcile(); !errors.Is(err, s.store.stuck) {
		t.Fatalf("got %v", err)
	}
	s.store.stuck = nil
	s.publish()
	if c := s.condition(v1alpha1.ConditionConflicting); c.Status == metav1.ConditionTrue {
		t.Errorf("got %+v", c)
	}
	s.mustHaveForeign(0)
}

// Slices of another driver on nodes without this driver's plugin are not
// touched.
func TestForeignSlicesElsewhereAreLeftAlone(t *testing.T) {
	for name, change := range map[string]func(*v1alpha1.GPUInventory){
		"not registered": func(inv *v1alpha1.GPUInventory) { inv.Status.RegisteredAt = nil },
		"conflicting": func(inv *v1alpha1.GPUInventory) {
			inv.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionConflicting, Status: metav1.ConditionTrue, Reason: "DevicePlugin"}}
		},
		"no answer": func(*v1alpha1.GPUInventory) {},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.report(change)
			s.store.foreign = append(s.store.foreign, foreignSlice())
			for range 3 {
				s.mustReconcile()
				s.clock.Step(answerWithin)
			}
			s.mustHaveForeign(1)
			s.mustHave(0)
		})
	}
}

// The other driver is installed where this one's plugin was, and is gone: this
// driver's slices are deleted, and the other's stay.
func TestTheNodeGoesToTheOtherDriver(t *testing.T) {
	s := newFixture(t)
	s.published()
	s.store.foreign = append(s.store.foreign, foreignSlice())
	for range 3 {
		s.mustReconcile()
		s.clock.Step(answerWithin)
	}
	s.mustHave(0)
	s.mustHaveForeign(1)
}

// Two drivers that are both at work must not write against each other.
func TestTwoDriversDoNotFight(t *testing.T) {
	s := newFixture(t)
	s.store.rewrites = true
	s.store.foreign = append(s.store.foreign, foreignSlice())
	for range 20 {
		s.mustReconcile()
		s.pluginAnswers()
	}
	writes := s.store.writes
	if c := s.condition(v1alpha1.ConditionConflicting); c.Status != metav1.ConditionTrue || c.Reason != v1alpha1.ReasonForeignSlices {
		t.Fatalf("got %+v", c)
	}
	s.mustHave(0)
	// For an hour: tried again, at a pace that slows down.
	for range 60 {
		s.clock.Step(maxContest / 30)
		s.publish()
	}
	if n := s.store.writes - writes; n > 20 {
		t.Errorf("%d writes in an hour", n)
	}
	if asked := s.inventory().Spec.PublishRequest; asked > 20 {
		t.Errorf("the plugin was asked %d times", asked)
	}
	s.mustHave(0)
	s.mustHaveForeign(1)
	s.restart()
	s.mustReconcile()
	s.mustHave(0)

	// The other driver goes, and leaves its slices behind.
	s.store.rewrites = false
	for range 4 {
		s.clock.Step(maxContest)
		s.publish()
	}
	s.mustHaveForeign(0)
	if c := s.condition(v1alpha1.ConditionConflicting); c.Status != metav1.ConditionFalse {
		t.Errorf("got %+v", c)
	}
	s.mustReconcile()
	s.publishAfterAnswer()
}

// An inventory that says Ready while no plugin answers would mislead users.
func TestSilentPluginIsNotReady(t *testing.T) {
	s := newFixture(t)
	ready := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Registered", LastTransitionTime: metav1.Now()}
	s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.Conditions = []metav1.Condition{ready} })
	s.published()
	if c := s.condition(v1alpha1.ConditionReady); c.Status != metav1.ConditionTrue {
		t.Fatalf("got %+v", c)
	}
	s.store.slices = nil // the kubelet wiped them
	s.mustReconcile()
	s.clock.Step(answerWithin - 1)
	s.mustReconcile()
	if c := s.condition(v1alpha1.ConditionReady); c.Status != metav1.ConditionTrue {
		t.Errorf("too early: %+v", c)
	}
	s.clock.Step(1)
	s.mustReconcile()
	if c := s.condition(v1alpha1.ConditionReady); c.Status != metav1.ConditionFalse || c.Reason != v1alpha1.ReasonPluginSilent {
		t.Errorf("got %+v", c)
	}
	version := s.inventory().ResourceVersion
	for range 3 {
		s.clock.Step(answerWithin)
		s.mustReconcile()
	}
	if s.inventory().ResourceVersion != version {
		t.Error("it was written again")
	}
	s.publishAfterAnswer()
}

// A server that doesn't have the kind has no inventories: that isn't a node
// without GPUs.
func TestNothingIsWithdrawnWhenTheKindIsGone(t *testing.T) {
	s := newFixture(t)
	s.published()
	controltest.Undefine(t, s.api, kinds.Inventories)
	if err := s.api.Delete(t.Context(), s.inventory()); err != nil {
		t.Fatal(err)
	}
	if err := s.reconcile(); !errors.Is(err, kinds.ErrGone) {
		t.Errorf("got %v, want that the kind is gone", err)
	}
	s.mustHave(1)
	controltest.Define(t, s.api, kinds.Inventories, time.Time{})
	s.mustReconcile()
	s.mustHave(0)
}
