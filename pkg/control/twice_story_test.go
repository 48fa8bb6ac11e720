//go:build integration

package control_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// One node's refusal ends shares that consume counters on all nodes.
func TestOlderSchedulerOfACluster(t *testing.T) {
	stop := startController(t)
	a, b := newMIGNode(t, 1), newMIGNode(t, 1)
	var policies []*v1alpha1.SharingPolicy
	for _, n := range []*node{a, b} {
		n.report(t)
		n.startPlugin(t)
		policies = append(policies, n.governs(t, v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}))
	}
	both, share := map[string]int{"gpu": 1, "mps for several": 1}, map[string]int{"mps for several": 1}
	a.waitForDevices(t, both)
	b.waitForDevices(t, both)

	report(t, a, &v1alpha1.DoubleAllocation{
		Devices: []string{"gpu-00000000", "gpu-00000000-mps"}, Claims: []string{"ns/whole", "ns/share"}, RefusedAt: metav1.Now(),
	})
	a.waitForDevices(t, share)
	b.waitForDevices(t, share)
	applied(t, policies[1], v1alpha1.ReasonUnsafeScheduler)
	eventually(t, "an event tells it", func() bool {
		var events corev1.EventList
		if err := api.List(t.Context(), &events, client.InNamespace(metav1.NamespaceDefault)); err != nil {
			t.Fatal(err)
		}
		for _, e := range events.Items {
			if e.Reason == "AllocatedTwice" && e.InvolvedObject.Name == a.name {
				return true
			}
		}
		return false
	})

	stop()
	startController(t)
	somethingElseHappens(t)
	b.waitForDevices(t, share)
	report(t, a, nil)
	a.waitForDevices(t, both)
	b.waitForDevices(t, both)
	applied(t, policies[1], v1alpha1.ReasonApplied)
}

// report writes a node's double allocation.
func report(t *testing.T, n *node, d *v1alpha1.DoubleAllocation) {
	t.Helper()
	eventually(t, "it is written", func() bool {
		inv := n.inventory(t)
		inv.Status.AllocatedTwice = d
		return api.Status().Update(t.Context(), inv) == nil
	})
}
