//go:build integration

package control_test

import (
	stdslices "slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// One node's refusal withdraws from all nodes what the scheduler can't be trusted with.
func TestDoubleAllocationInACluster(t *testing.T) {
	for name, tc := range map[string]struct {
		plan      v1alpha1.Plan
		all, left map[string]int
		refused   string // device
	}{
		"shares":     {bySize(), map[string]int{"gpu": 1, "mps for several": 1}, map[string]int{"mps for several": 1}, "gpu-00000000-mps"},
		"partitions": {v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"3g.40gb"}}}, map[string]int{"gpu": 1, "3g.40gb": 2}, map[string]int{"gpu": 1}, "gpu-00000000-mig-3g40gb-4"},
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

			holder, refused := a.give(t, "gpu-00000000"), a.give(t, tc.refused)
			one := func(c *resourceapi.ResourceClaim) v1alpha1.AllocatedDevice {
				return v1alpha1.AllocatedDevice{Namespace: c.Namespace, Name: c.Name, UID: string(c.UID), Pod: "p", Device: c.Status.Allocation.Devices.Results[0].Device}
			}
			report(t, a, &v1alpha1.DoubleAllocation{Holder: one(holder), Refused: one(refused), RefusedAt: metav1.Now()})
			b.waitForDevices(t, tc.left)
			if told := applied(t, policies[1], v1alpha1.ReasonUnsafeScheduler); !strings.Contains(told, refused.Name+" of pod p") {
				t.Errorf("the policy says %q, want the claim %s in it", told, refused.Name)
			}
			eventually(t, "an event tells it", func() bool { return a.hasEvent(t, "DoubleAllocation") })
			release(t, refused)
			release(t, holder)
			a.waitForDevices(t, tc.left)

			stop()
			startController(t)
			somethingElseHappens(t)
			b.waitForDevices(t, tc.left)
			report(t, a, nil)
			a.waitForDevices(t, tc.all)
			b.waitForDevices(t, tc.all)
			applied(t, policies[1], v1alpha1.ReasonApplied)
		})
	}
}

func bySize() v1alpha1.Plan {
	return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}
}

// hasEvent reports whether the node's inventory has an event with the reason.
func (n *node) hasEvent(t *testing.T, reason string) bool {
	t.Helper()
	var events corev1.EventList
	if err := api.List(t.Context(), &events, client.InNamespace(metav1.NamespaceDefault)); err != nil {
		t.Fatal(err)
	}
	return stdslices.ContainsFunc(events.Items, func(e corev1.Event) bool { return e.Reason == reason && e.InvolvedObject.Name == n.name })
}

// report writes a node's double allocation.
func report(t *testing.T, n *node, d *v1alpha1.DoubleAllocation) {
	t.Helper()
	eventually(t, "it is written", func() bool {
		inv := n.inventory(t)
		inv.Status.DoubleAllocation = d
		return api.Status().Update(t.Context(), inv) == nil
	})
}
