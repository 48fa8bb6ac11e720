package control

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// define installs the definition of a custom resource.
func define(t *testing.T, api client.Client, resource string, now time.Time) {
	t.Helper()
	definition := &metav1.PartialObjectMetadata{}
	definition.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	definition.SetName(resource + "." + v1alpha1.GroupVersion.Group)
	definition.SetCreationTimestamp(metav1.NewTime(now))
	if err := api.Create(t.Context(), definition); err != nil {
		t.Fatal(err)
	}
}

// TestNodesKeepTheirPoolsWhenKindsAreInstalledAgain checks that the plugins have
// time to report before their nodes' slices are deleted.
func TestNodesKeepTheirPoolsWhenKindsAreInstalledAgain(t *testing.T) {
	s := newFixture(t)
	s.nodes.inventories.kinds = definitions{s.api, s.clock}
	s.report(func(inv *v1alpha1.GPUInventory) {
		inv.CreationTimestamp = metav1.NewTime(s.clock.Now().Add(-time.Hour))
	})
	s.published()
	writes := s.store.writes
	define(t, s.api, inventories, s.clock.Now())
	old := s.inventory()
	if err := s.api.Delete(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s.clock.Step(reportWithin / 4)
		if err := s.reconcile(); !errors.Is(err, errKindNew) {
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
	s.clock.Step(reportWithin)
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
	s.clock.Step(reportWithin - time.Second)
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
	s.nodes.inventories.kinds = definitions{s.api, s.clock}
	define(t, s.api, inventories, s.clock.Now())
	s.clock.Step(time.Second)
	s.report(func(inv *v1alpha1.GPUInventory) { inv.CreationTimestamp = metav1.NewTime(s.clock.Now()) })
	s.published()
	if err := s.api.Delete(t.Context(), s.inventory()); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	s.mustHave(0)
}

// kindsFunc is a server whose answers a test computes.
type kindsFunc func() error

func (f kindsFunc) served(context.Context, string, time.Time) (time.Time, error) {
	return time.Time{}, f()
}

// TestServerIsAskedWithoutALock checks that a slow answer about one node's inventory,
// or about a policy, doesn't delay the other nodes.
func TestServerIsAskedWithoutALock(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(nodeWith("n", "", h100(0)), sharing("p", v1alpha1.SharingPolicySpec{Plan: exclusive()}))...)
	f.statuses(t)
	asked := 0
	free := func(mu *sync.Mutex) kindsFunc {
		return func() error {
			asked++
			if !mu.TryLock() {
				return errors.New("the lock is held")
			}
			mu.Unlock()
			return nil
		}
	}
	r := newInventoryReader(f.api, f.api, nil)
	r.kinds = free(&r.mu)
	if _, err := r.get(t.Context(), "missing"); err != nil {
		t.Errorf("a missing inventory: %v", err)
	}
	book := f.policies.planner.book
	book.kinds = free(&book.mu)
	if err := f.api.Delete(t.Context(), sharing("p", v1alpha1.SharingPolicySpec{})); err != nil {
		t.Fatal(err)
	}
	if _, err := book.load(t.Context()); err != nil {
		t.Errorf("a missing policy: %v", err)
	}
	if asked != 2 {
		t.Errorf("the server was asked %d times, want 2", asked)
	}
}

// TestPoliciesAreNamedWhenKindsAreInstalledAgain checks that GPUs keep their plans
// until there was time to apply the policies again, and that the log then names
// those that are gone.
func TestPoliciesAreNamedWhenKindsAreInstalledAgain(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(nodeWith("n", "", h100(0)), sharing("p", v1alpha1.SharingPolicySpec{Plan: exclusive()}))...)
	clock := testingclock.NewFakeClock(time.Unix(2000, 0))
	f.policies.planner.book.kinds = definitions{f.api, clock}
	f.statuses(t)
	define(t, f.api, sharingPolicies, clock.Now())
	if err := f.api.Delete(t.Context(), sharing("p", v1alpha1.SharingPolicySpec{})); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	clock.Step(reportWithin - time.Second)
	if _, err := f.policies.planner.book.load(ctx); !errors.Is(err, errKindNew) || log.Len() > 0 {
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
