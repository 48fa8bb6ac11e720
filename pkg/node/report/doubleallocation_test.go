package report_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

// TestDoubleAllocation checks that a double allocation is written once, stays as it is
// while it counts, survives the plugin, and stays away after it was removed.
func TestDoubleAllocation(t *testing.T) {
	s := newServer(t)
	r, stop := start(t, s)
	if err := r.Found(node(h100)); err != nil {
		t.Fatal(err)
	}
	of := func(claim, device string) v1alpha1.DoubleAllocation {
		return v1alpha1.DoubleAllocation{
			Refused: v1alpha1.AllocatedDevice{Namespace: "ns", Name: claim, UID: claim, Pod: "p", Device: "gpu-00000000"},
			Holder:  v1alpha1.AllocatedDevice{Namespace: "ns", Name: "other", UID: "other", Device: device}, Kubernetes: "v1.36.3", RefusedAt: metav1.Now(),
		}
	}
	const bySize, partition = "gpu-00000000-mps", "gpu-00000000-mig-1g10gb-0"
	r.Registered()
	eventually(t, s, "a plugin at work", ready(report.ReasonRegistered))
	told := func(claim string) func(*v1alpha1.GPUInventory) bool {
		return func(inv *v1alpha1.GPUInventory) bool {
			return inv.Status.DoubleAllocation != nil && inv.Status.DoubleAllocation.Refused.UID == claim
		}
	}
	change := func(change func(*v1alpha1.GPUInventory)) {
		s.change("gpuinventories", func() (string, any) {
			inv := s.inventory.DeepCopy()
			change(inv)
			s.store(inv)
			return "MODIFIED", inv
		})
	}
	requests := int64(0)
	// answered waits until the plugin has seen the last change.
	answered := func() *v1alpha1.GPUInventory {
		t.Helper()
		requests++
		s.request(requests)
		return eventually(t, s, "an answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == requests })
	}
	reports := func(want bool, d v1alpha1.DoubleAllocation) {
		t.Helper()
		if got := r.ReportDoubleAllocation(d); got != want {
			t.Errorf("reporting that of %s: done %v, want %v", d.Refused.UID, got, want)
		}
	}
	reports(false, of("first", bySize)) // a plugin that ends now must report it again
	eventually(t, s, "the double allocation", told("first"))
	answered()
	reports(true, of("first", bySize))
	reports(false, of("second", bySize)) // the first isn't judged yet
	change(func(inv *v1alpha1.GPUInventory) { inv.Status.DoubleAllocation.Confirmed = true })
	answered()
	reports(true, of("second", bySize))
	if inv := answered(); !told("first")(inv) || !inv.Status.DoubleAllocation.Confirmed {
		t.Errorf("got %+v, want the first, confirmed", inv.Status.DoubleAllocation)
	}

	stop()
	r, _ = start(t, s)
	if err := r.Found(node(h100)); err != nil {
		t.Fatal(err)
	}
	r.Registered()
	if inv := answered(); !told("first")(inv) {
		t.Errorf("the next plugin made it %+v", inv.Status.DoubleAllocation)
	}
	reports(false, of("worse", partition))
	eventually(t, s, "one that says more", told("worse"))
	change(func(inv *v1alpha1.GPUInventory) { inv.Status.DoubleAllocation.Confirmed = true })
	answered()
	newer := of("newer", bySize)
	newer.Kubernetes = "v1.37.1"
	reports(false, newer)
	eventually(t, s, "one after an upgrade", told("newer"))
	change(func(inv *v1alpha1.GPUInventory) { inv.Status.DoubleAllocation = nil })
	answered()
	reports(true, newer)
	if inv := answered(); inv.Status.DoubleAllocation != nil {
		t.Errorf("it is back: %+v", inv.Status.DoubleAllocation)
	}
}
