package nodes

import (
	"errors"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
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
