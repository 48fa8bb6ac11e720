//go:build integration

package control_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// TestDoubleAllocationInACluster checks that one node's refusal withdraws the devices of that
// node with which the scheduler can't be trusted, and changes nothing of the others.
func TestDoubleAllocationInACluster(t *testing.T) {
	for name, tc := range map[string]struct {
		plan      v1alpha1.Plan
		all, left map[string]int
	}{
		"shares":     {bySize(), map[string]int{"gpu": 1, "mps for several": 1}, map[string]int{"mps for several": 1}},
		"partitions": {v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"3g.40gb"}}}, map[string]int{"gpu": 1, "3g.40gb": 2}, map[string]int{"gpu": 1}},
	} {
		t.Run(name, func(t *testing.T) {
			stop := startController(t)
			a, b := newMIGNode(t, 1), newMIGNode(t, 1)
			var policies []*v1alpha1.SharingPolicy
			for _, n := range []*node{a, b} {
				n.report(t)
				n.startPlugin(t)
				policies = append(policies, n.governs(t, tc.plan))
			}
			a.waitForDevices(t, tc.all)
			b.waitForDevices(t, tc.all)

			refuses(t, a)
			a.waitForDevices(t, tc.left)
			applied(t, policies[0], v1alpha1.ReasonUnsafeScheduler)
			stop()
			startController(t)
			somethingElseHappens(t)
			a.waitForDevices(t, tc.left)
			b.waitForDevices(t, tc.all)
			applied(t, policies[1], v1alpha1.ReasonApplied)
		})
	}
}

func bySize() v1alpha1.Plan {
	return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}
}

// refuses makes a node's plugin report a double allocation.
func refuses(t *testing.T, n *node) {
	t.Helper()
	config := serverConfig(t)
	client, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	version, err := client.ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is written", func() bool {
		inv := n.inventory(t)
		meta.SetStatusCondition(&inv.Status.Conditions, metav1.Condition{
			Type: v1alpha1.ConditionDoubleAllocation, Status: metav1.ConditionTrue, Reason: v1alpha1.DoubleAllocationReason(version.GitVersion), Message: "refused",
		})
		return api.Status().Update(t.Context(), inv) == nil
	})
}
