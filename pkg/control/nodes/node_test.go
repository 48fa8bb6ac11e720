package nodes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

func TestNothingIsPublishedUnasked(t *testing.T) {
	s := newFixture(t)
	for range 3 {
		s.mustReconcile()
	}
	s.mustHave(0)
	s.mustHaveAsked(1)
}

func TestNothingIsWrittenWhenNothingChanged(t *testing.T) {
	s := newFixture(t)
	s.published()
	s.restart()
	before, version := s.store.writes, s.inventory().ResourceVersion
	for range 3 {
		s.mustReconcile()
	}
	if s.store.writes != before || s.inventory().ResourceVersion != version {
		t.Errorf("%d writes of slices, inventory at version %s, was %s", s.store.writes-before, s.inventory().ResourceVersion, version)
	}
}

func TestChangedSlicesAreReplaced(t *testing.T) {
	for name, change := range map[string]func(*resourceapi.ResourceSlice){
		"owner":  func(s *resourceapi.ResourceSlice) { s.OwnerReferences = nil },
		"device": func(s *resourceapi.ResourceSlice) { s.Spec.Devices = s.Spec.Devices[1:] },
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.published()
			s.mustReconcile()
			want := s.store.slices[0].DeepCopy()
			change(s.store.slices[0])
			s.mustReconcile()
			want.Spec.Pool.Generation++
			if diff := cmp.Diff(want, s.store.slices[0]); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestAnOldAnswerIsNoAnswer(t *testing.T) {
	s := newFixture(t)
	s.published()
	s.restart()
	s.store.slices = nil // while no controller was there
	s.mustReconcile()
	s.mustHave(0)
	s.mustHaveAsked(2)
	s.publishAfterAnswer()
}

func TestAnAnswerServesOneAttempt(t *testing.T) {
	s := newFixture(t)
	s.mustReconcile()
	s.pluginAnswers()
	s.mustBeFull()
	s.clock.Step(undone.MaxRetryDelay)
	s.mustReconcile()
	s.mustHave(0)
	s.mustHaveAsked(2)
	s.publishAfterAnswer()
}

// Each write, and each answer, wakes the controller again: the work queue's own
// delays don't slow this down.
func TestAServerThatStoresOnlyAPartIsNotStormed(t *testing.T) {
	s := newFixture(t)
	s.mustReconcile()
	s.pluginAnswers()
	s.store.broken = &publish.DroppedFieldsError{Slice: "n-000"}
	for range 20 {
		_ = s.reconcile()
		s.pluginAnswers()
	}
	if s.store.writes > 2 {
		t.Errorf("%d writes of slices without time passing", s.store.writes)
	}
	s.mustHaveAsked(1)

	r := reconcile.Request{}
	r.Name = "n"
	if result, err := s.nodes.Reconcile(t.Context(), r); err != nil || result.RequeueAfter <= 0 {
		t.Errorf("got %+v, %v, want another try later", result, err)
	}
	s.store.broken = nil
	s.clock.Step(undone.MaxRetryDelay)
	s.mustReconcile()
	s.publishAfterAnswer()
}

// TestRequeueAfterTheRestOfAPause checks that a reconciliation that comes during a
// pause doesn't make it longer.
func TestRequeueAfterTheRestOfAPause(t *testing.T) {
	s := newFixture(t)
	s.mustReconcile()
	s.pluginAnswers()
	s.store.broken = errors.New("the server is full")
	_ = s.reconcile()
	s.clock.Step(undone.FirstRetryDelay / 2)
	r := reconcile.Request{}
	r.Name = "n"
	result, err := s.nodes.Reconcile(t.Context(), r)
	if err != nil || result.RequeueAfter != undone.FirstRetryDelay/2 {
		t.Errorf("got %s, %v, want %s", result.RequeueAfter, err, undone.FirstRetryDelay/2)
	}
}

// TestPausesGrow checks how long pauses last, and when they start over.
func TestPausesGrow(t *testing.T) {
	c := testingclock.NewFakeClock(time.Unix(1000, 0))
	p := newPauses(c, time.Second, 4*time.Second)
	var got []time.Duration
	for range 4 {
		p.begin("n")
		got = append(got, p.left("n"))
		c.Step(p.left("n"))
	}
	c.Step(8 * time.Second)
	p.begin("n")
	if got = append(got, p.left("n")); !slices.Equal(got, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 4 * time.Second, time.Second}) {
		t.Errorf("got %v", got)
	}
	p.forget("n")
	if p.left("n") != 0 {
		t.Error("a pause that was forgotten lasts")
	}
}

// TestDeletedNodeIsForgotten checks that the controller's memory doesn't grow with
// nodes that come and go.
func TestDeletedNodeIsForgotten(t *testing.T) {
	s := newFixture(t)
	s.store.rewrites = true
	s.store.foreign = append(s.store.foreign, foreignSlice())
	for range 5 {
		s.mustReconcile()
		s.pluginAnswers()
	}
	s.store.broken = errors.New("the server is full")
	s.nodes.failures.begin("n")
	s.nodes.registrations.first["n"] = registration{}
	if len(s.nodes.evicted) == 0 || s.nodes.contests.left("n") == 0 {
		t.Fatal("the node isn't contested")
	}
	if err := s.api.Delete(t.Context(), s.inventory()); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	n := s.nodes
	if left := len(n.evicted) + len(n.publishRequests) + len(n.contests.end) + len(n.failures.end) + len(n.unseen) + len(n.registrations.first); left > 0 {
		t.Errorf("%d entries are left", left)
	}
	_, decided := n.Planner.Last("n")
	if _, published := n.Planner.PublishedSince("n"); decided || published {
		t.Errorf("the node's decision is left: %v, its publication: %v", decided, published)
	}
}

// TestConflictIsNoWrite checks that the log doesn't claim a write that the server
// refused.
func TestConflictIsNoWrite(t *testing.T) {
	s := newFixture(t)
	old := s.inventory()
	changed := old.DeepCopy()
	changed.Status.BootID = "changed since"
	if err := s.api.Status().Update(t.Context(), changed); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	c := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonPluginSilent}
	if err := s.nodes.setCondition(ctx, old, c); err != nil || log.Len() > 0 {
		t.Errorf("after a conflict: %v, log %q", err, &log)
	}
	if err := s.nodes.setCondition(ctx, s.inventory(), c); err != nil || log.Len() == 0 {
		t.Errorf("after a write: %v, log %q", err, &log)
	}
}

// Devices that must not be allocated are withdrawn at once, even after
// failures.
func TestAFailureDoesNotDelayWithdrawal(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.SplitCounters
	s.cuttable()
	s.mustReconcile()
	s.pluginAnswers()
	s.store.broken = errors.New("the server is full")
	_ = s.reconcile()
	s.mustHave(1)
	s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.RegisteredAt = nil })
	s.mustReconcile()
	s.mustHave(0)
}

// stale is a cache that doesn't know yet what happened to the inventory.
type stale struct {
	client.Client
	inventory *v1alpha1.GPUInventory
}

func (c stale) Get(_ context.Context, _ client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	c.inventory.DeepCopyInto(into.(*v1alpha1.GPUInventory))
	return nil
}

// A controller that has just taken over may ask with a number that was asked
// and answered already, by a plugin that may be dead since.
func TestAnAnswerToAnotherIsNoAnswer(t *testing.T) {
	s := newFixture(t)
	s.published()
	before := s.inventory()
	s.store.slices = nil
	s.mustReconcile()
	s.pluginAnswers()
	s.mustHaveAsked(2)

	s.restart()
	s.nodes.Client = stale{s.api, before}
	s.mustReconcile()
	s.nodes.Client = s.api
	s.mustReconcile()
	s.mustHave(0)
	s.mustHaveAsked(3)
	s.publishAfterAnswer()
}

func TestARequestDiesWithItsInventory(t *testing.T) {
	s := newFixture(t)
	s.published()
	s.store.slices = nil
	s.mustReconcile()
	s.mustHaveAsked(2)
	s.report(func(inv *v1alpha1.GPUInventory) { inv.UID = "second" })
	s.mustReconcile()
	s.mustHaveAsked(1)
	s.publishAfterAnswer()
}

// The answer was given for GPUs that were gone when it came. Those that come
// back may be reported by the next plugin, which isn't registered yet.
func TestAnAnswerDoesNotOutliveTheGPUs(t *testing.T) {
	s := newFixture(t)
	s.mustReconcile()
	inv := s.inventory()
	gpus := inv.Status.GPUs
	for _, now := range [][]v1alpha1.GPU{nil, gpus} {
		inv = s.inventory()
		inv.Status.PublishResponse, inv.Status.GPUs = 1, now
		if err := s.api.Status().Update(t.Context(), inv); err != nil {
			t.Fatal(err)
		}
		s.mustReconcile()
	}
	s.mustHave(0)
	s.mustHaveAsked(2)
	s.publishAfterAnswer()
}

func TestPoolIsWithdrawn(t *testing.T) {
	for name, change := range map[string]func(*v1alpha1.GPUInventory){
		"not registered":       func(inv *v1alpha1.GPUInventory) { inv.Status.RegisteredAt = nil },
		"no GPUs":              func(inv *v1alpha1.GPUInventory) { inv.Status.GPUs = nil },
		"another driver's now": func(inv *v1alpha1.GPUInventory) { inv.Status.Conditions = conflict() },
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.published()
			s.report(change)
			s.mustReconcile()
			s.mustHave(0)
			s.mustHaveAsked(0)
		})
	}
}

func conflict() []metav1.Condition {
	return []metav1.Condition{{Type: v1alpha1.ConditionConflicting, Status: metav1.ConditionTrue, Reason: "DevicePlugin"}}
}

// TestInventoryWithoutNodeIsRefused: the slices would have no owner, and outlive the node.
// Those that are there would stay as they are, whatever happens to the node's GPUs.
func TestInventoryWithoutNodeIsRefused(t *testing.T) {
	s := newFixture(t)
	s.published()
	s.report(func(inv *v1alpha1.GPUInventory) { inv.OwnerReferences[0].Name = "another" })
	err := s.reconcile()
	if !errors.Is(err, reconcile.TerminalError(nil)) {
		t.Errorf("got %v, want an error that isn't retried", err)
	}
	s.mustHave(0)
	s.mustHaveAsked(0)
	writes := s.store.writes
	if err := s.reconcile(); err == nil || s.store.writes != writes {
		t.Errorf("got %v after %d writes", err, s.store.writes-writes)
	}
}

func TestNewFactsNeedNoAnswer(t *testing.T) {
	s := newFixture(t)
	s.published()
	s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.GPUs = inv.Status.GPUs[:1] })
	s.mustReconcile()
	s.mustHave(1)
	if !publish.Complete(s.store.slices) {
		t.Error("the pool is not complete")
	}
	s.mustHaveAsked(0) // the inventory was created again
}

// TestNothingIsDecidedAgain checks that events which change nothing lead to no decision.
func TestNothingIsDecidedAgain(t *testing.T) {
	sick := func(inv *v1alpha1.GPUInventory) {
		inv.Status.GPUs = []v1alpha1.GPU{controltest.PlainGPU(0, "NVIDIA L4")}
		inv.Status.GPUs[0].Conditions = []v1alpha1.GPUCondition{{Type: string(gpu.ResetRequired), LastTransitionTime: new(metav1.Unix(900, 0))}}
	}
	for name, tc := range map[string]struct {
		report   func(*v1alpha1.GPUInventory)
		taints   bool
		answered bool
		slices   int
	}{
		"published":             {answered: true, slices: 1},
		"published with taints": {report: sick, taints: true, answered: true, slices: 1},
		"nothing to publish":    {report: sick, answered: true},
		"waiting for an answer": {},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.server.Taints = tc.taints
			if tc.report != nil {
				s.report(tc.report)
			}
			s.mustReconcile()
			if tc.answered {
				s.pluginAnswers()
				s.mustReconcile()
			}
			s.mustHave(tc.slices)
			s.mustReconcile()
			// Each decision has slices of its own.
			decision := func() string {
				last, _ := s.nodes.Planner.Last("n")
				return fmt.Sprintf("%p %p", last.GPUs, last.Withheld)
			}
			before := decision()
			for range 2 {
				s.mustReconcile()
			}
			if decision() != before {
				t.Error("the node's offer was decided again")
			}
		})
	}
}
