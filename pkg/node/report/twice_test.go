package report_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

// TestAllocatedTwice checks that a double allocation is written once for each
// version of Kubernetes, survives the plugin, and stays away after it was removed.
func TestAllocatedTwice(t *testing.T) {
	s := newServer(t)
	r, stop := start(t, s)
	if err := r.Found(node(h100)); err != nil {
		t.Fatal(err)
	}
	r.Registered()
	eventually(t, s, "a plugin at work", ready(report.ReasonRegistered))
	of := func(claim string) v1alpha1.DoubleAllocation {
		return v1alpha1.DoubleAllocation{Devices: []string{"a", "b"}, Claims: []string{claim, "ns/other"}, Kubernetes: "v1.36.3", RefusedAt: metav1.Now()}
	}
	told := func(claim string) func(*v1alpha1.GPUInventory) bool {
		return func(inv *v1alpha1.GPUInventory) bool {
			return inv.Status.AllocatedTwice != nil && inv.Status.AllocatedTwice.Claims[0] == claim
		}
	}
	r.AllocatedTwice(of("ns/first"))
	eventually(t, s, "the double allocation", told("ns/first"))
	confirm := func(change func(*v1alpha1.GPUInventory)) {
		s.change("gpuinventories", func() (string, any) {
			inv := s.inventory.DeepCopy()
			change(inv)
			s.store(inv)
			return "MODIFIED", inv
		})
	}
	confirm(func(inv *v1alpha1.GPUInventory) { inv.Status.AllocatedTwice.Confirmed = true })
	r.AllocatedTwice(of("ns/second"))
	s.request(1)
	inv := eventually(t, s, "an answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == 1 })
	if !told("ns/first")(inv) || !inv.Status.AllocatedTwice.Confirmed {
		t.Errorf("got %+v, want the first, confirmed", inv.Status.AllocatedTwice)
	}

	stop()
	r, _ = start(t, s)
	if err := r.Found(node(h100)); err != nil {
		t.Fatal(err)
	}
	r.Registered()
	s.request(2)
	inv = eventually(t, s, "the next plugin's answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == 2 })
	if !told("ns/first")(inv) {
		t.Errorf("the next plugin made it %+v", inv.Status.AllocatedTwice)
	}
	confirm(func(inv *v1alpha1.GPUInventory) { inv.Status.AllocatedTwice = nil })
	s.request(3)
	inv = eventually(t, s, "another answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == 3 })
	if inv.Status.AllocatedTwice != nil {
		t.Errorf("it is back: %+v", inv.Status.AllocatedTwice)
	}
	newer := of("ns/third")
	newer.Kubernetes = "v1.37.1"
	r.AllocatedTwice(newer)
	eventually(t, s, "one after an upgrade", told("ns/third"))
}
