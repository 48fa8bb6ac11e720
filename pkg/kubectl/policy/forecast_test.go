package policy

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/forecast"
	"github.com/tessera-dra/tessera/pkg/kubectl/machines"
)

// TestForecastOfWhatNodesReport checks that a forecast follows the nodes' reports about their
// GPUs' health and the scheduler, as the controller does.
func TestForecastOfWhatNodesReport(t *testing.T) {
	rows := []v1alpha1.GPUCondition{{Type: string(gpu.RowRemapPending), Status: metav1.ConditionTrue, Message: "rows wait for a reset"}}
	doubly := []metav1.Condition{{
		Type: v1alpha1.ConditionDoubleAllocation, Status: metav1.ConditionTrue, Reason: v1alpha1.DoubleAllocationReason("v1.37.1"),
	}}
	exclusive := v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}}
	withTaints := publish.Abilities{Counters: publish.SplitCounters, Taints: publish.Yes, Charged: true, Version: "v1.37.1"}
	withoutTaints := publish.Abilities{Counters: publish.NoCounters, Multiple: publish.No, Taints: publish.No, InformationalTaints: publish.No, Version: "v1.34.1"}
	for name, tc := range map[string]struct {
		machine string
		change  func(*v1alpha1.GPUInventoryStatus)
		spec    v1alpha1.SharingPolicySpec
		server  publish.Abilities
		want    []string
	}{
		"condition that blocks by policy": {
			machine: "1xl40s", change: func(s *v1alpha1.GPUInventoryStatus) { s.GPUs[0].Conditions = rows },
			spec:   v1alpha1.SharingPolicySpec{Plan: exclusive, Health: v1alpha1.HealthPolicy{RowRemapPending: v1alpha1.NoSchedule}},
			server: withoutTaints,
			want:   []string{"- 1× gpu", "problem: New claims don't get all of it: RowRemapPending: rows wait for a reset."},
		},
		"condition that taints by policy": {
			machine: "1xl40s", change: func(s *v1alpha1.GPUInventoryStatus) { s.GPUs[0].Conditions = rows },
			spec:   v1alpha1.SharingPolicySpec{Plan: exclusive, Health: v1alpha1.HealthPolicy{RowRemapPending: v1alpha1.NoSchedule}},
			server: withTaints,
			want:   []string{"the same devices as now", "problem: New claims don't get all of it: RowRemapPending: rows wait for a reset."},
		},
		"double allocation": {
			machine: "1xh100-80gb", change: func(s *v1alpha1.GPUInventoryStatus) { s.Conditions = doubly },
			spec:   v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"3g.40gb"}}}},
			server: withTaints,
			want:   []string{"the same devices as now", "problem: A scheduler of the cluster doesn't count shared counters"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			inv, err := machines.Inventory(tc.machine)
			if err != nil {
				t.Fatal(err)
			}
			inv.Name = "node-0"
			tc.change(&inv.Status)
			in := planFacts{nodes: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "node-0"}}}, inventories: []v1alpha1.GPUInventory{*inv}, server: tc.server}
			all := []v1alpha1.SharingPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: tc.spec}}
			if in.after, err = forecast.Rules(t.Context(), all, "p"); err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			in.predict("p").print(&out)
			for _, want := range tc.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("got\n%s\nwant in it %q", out.String(), want)
				}
			}
		})
	}
}
