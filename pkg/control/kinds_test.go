package control

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// TestNodesKeepTheirPoolsWhenKindsAreInstalledAgain checks that the plugins have
// time to report before their nodes' slices are deleted.
func TestNodesKeepTheirPoolsWhenKindsAreInstalledAgain(t *testing.T) {
	s := newFixture(t)
	s.report(func(inv *v1alpha1.GPUInventory) {
		inv.CreationTimestamp = metav1.NewTime(s.clock.Now().Add(-time.Hour))
	})
	s.published()
	writes := s.store.writes
	controltest.Define(t, s.api, kinds.Inventories, s.clock.Now())
	old := s.inventory()
	if err := s.api.Delete(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s.clock.Step(kinds.ReportWithin / 4)
		if err := s.reconcile(); !errors.Is(err, kinds.ErrNew) {
			t.Fatalf("got %v, want that the kind is new", err)
		}
	}
	// The plugin creates the object first, and then writes its status.
	bare := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{
		Name: "n", UID: "second", OwnerReferences: old.OwnerReferences, CreationTimestamp: metav1.NewTime(s.clock.Now()),
	}}
	if err := s.api.Create(t.Context(), bare); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	bare.Status = old.Status
	if err := s.api.Status().Update(t.Context(), bare); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	s.mustHave(1)
	if s.store.writes != writes {
		t.Errorf("the slices were written %d times", s.store.writes-writes)
	}
	if err := s.api.Delete(t.Context(), bare); err != nil {
		t.Fatal(err)
	}
	s.clock.Step(kinds.ReportWithin)
	s.mustReconcile()
	s.mustHave(0)
}

// TestInventoryWithoutAStatus checks that the slices of a node are withdrawn if its
// new inventory doesn't get a status in time.
func TestInventoryWithoutAStatus(t *testing.T) {
	s := newFixture(t)
	s.published()
	old := s.inventory()
	if err := s.api.Delete(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	bare := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{
		Name: "n", UID: "second", OwnerReferences: old.OwnerReferences, CreationTimestamp: metav1.NewTime(s.clock.Now()),
	}}
	if err := s.api.Create(t.Context(), bare); err != nil {
		t.Fatal(err)
	}
	s.clock.Step(kinds.ReportWithin - time.Second)
	result, err := s.nodes.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(bare)})
	if err != nil || result.RequeueAfter != time.Second {
		t.Errorf("got %+v, %v, want another look in a second", result, err)
	}
	s.mustHave(1)
	s.clock.Step(time.Second)
	s.mustReconcile()
	s.mustHave(0)
}

// TestInventoryIsDeletedUnderANewKind checks that a pool is withdrawn at once if its
// inventory was created after the kind was installed: somebody has deleted it.
func TestInventoryIsDeletedUnderANewKind(t *testing.T) {
	s := newFixture(t)
	controltest.Define(t, s.api, kinds.Inventories, s.clock.Now())
	s.clock.Step(time.Second)
	s.report(func(inv *v1alpha1.GPUInventory) { inv.CreationTimestamp = metav1.NewTime(s.clock.Now()) })
	s.published()
	if err := s.api.Delete(t.Context(), s.inventory()); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	s.mustHave(0)
}

// TestServerIsAskedWithoutALock checks that a slow answer about a policy's kind doesn't delay
// the nodes.
func TestServerIsAskedWithoutALock(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.H100(0)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	f.statuses(t)
	book, asked := f.policies.planner.book, 0
	book.definitions.Server = interceptor.NewClient(f.api, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			asked++
			if !book.mu.TryLock() {
				return errors.New("the lock is held")
			}
			book.mu.Unlock()
			return c.Get(ctx, key, o, opts...)
		},
	})
	if err := f.api.Delete(t.Context(), controltest.Policy("p", v1alpha1.SharingPolicySpec{})); err != nil {
		t.Fatal(err)
	}
	if _, err := book.load(t.Context()); err != nil || asked != 1 {
		t.Errorf("asked %d times about a missing policy: %v", asked, err)
	}
}

// TestPoliciesAreNamedWhenKindsAreInstalledAgain checks that GPUs keep their plans
// until there was time to apply the policies again, and that the log then names
// those that are gone.
func TestPoliciesAreNamedWhenKindsAreInstalledAgain(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.H100(0)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	clock := testingclock.NewFakeClock(time.Unix(2000, 0))
	f.policies.planner.book.definitions.Clock = clock
	f.statuses(t)
	controltest.Define(t, f.api, kinds.SharingPolicies, clock.Now())
	if err := f.api.Delete(t.Context(), controltest.Policy("p", v1alpha1.SharingPolicySpec{})); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	clock.Step(kinds.ReportWithin - time.Second)
	if _, err := f.policies.planner.book.load(ctx); !errors.Is(err, kinds.ErrNew) || log.Len() > 0 {
		t.Fatalf("got %v, want that the kind is new; log: %s", err, &log)
	}
	clock.Step(time.Second)
	for range 2 {
		if r, err := f.policies.planner.book.load(ctx); err != nil || len(r.accepted) > 0 {
			t.Errorf("got %v, %v", r.accepted, err)
		}
	}
	if n := strings.Count(log.String(), `policies=["p"]`); n != 1 {
		t.Errorf("the policy is named %d times in: %s", n, &log)
	}
}
