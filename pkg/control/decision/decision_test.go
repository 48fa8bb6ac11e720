package decision_test

import (
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/decision"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// TestCountersAfterADoubleAllocation checks while which answers of API servers a node's double
// allocation keeps its counters from being used.
func TestCountersAfterADoubleAllocation(t *testing.T) {
	const refused = "v1.36.3-gke.100"
	for name, tc := range map[string]struct {
		status   metav1.ConditionStatus
		able     publish.Abilities
		counters int // counter sets that are published
		told     bool
	}{
		"same version":                    {status: metav1.ConditionTrue, able: publish.Abilities{Version: refused}, told: true},
		"another build":                   {status: metav1.ConditionTrue, able: publish.Abilities{Version: "v1.36.3-gke.101"}, counters: 1},
		"another version":                 {status: metav1.ConditionTrue, able: publish.Abilities{Version: "v1.37.1"}, counters: 1},
		"servers that answer in turns":    {status: metav1.ConditionTrue, able: publish.Abilities{Version: "v1.37.1", Doubt: "they differ"}, told: true},
		"a version that isn't known":      {status: metav1.ConditionTrue, told: true},
		"a condition that has ended":      {status: metav1.ConditionFalse, able: publish.Abilities{Version: refused}, counters: 1},
		"a server that stores none":       {status: metav1.ConditionTrue, able: publish.Abilities{Version: refused, Counters: publish.NoCounters}},
		"a server of which it is unknown": {status: metav1.ConditionTrue, able: publish.Abilities{Version: refused, Counters: publish.UnknownCounters, Doubt: "refused"}},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.told || tc.counters > 0 {
				tc.able.Counters = publish.SplitCounters
			}
			inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
			inv.Status.Conditions = []metav1.Condition{{
				Type: v1alpha1.ConditionDoubleAllocation, Status: tc.status, Reason: v1alpha1.DoubleAllocationReason(refused),
			}}
			inv.Status.GPUs = []v1alpha1.GPU{{UUID: "GPU-11111111-0000-0000-0000-000000000000", ProductName: "NVIDIA H100 80GB HBM3", MIG: &v1alpha1.MIG{
				Switchable: true,
				Profiles:   []v1alpha1.MIGProfile{{Name: "3g.40gb", MaxInstances: 2, Placements: []v1alpha1.MIGPlacement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}}},
			}}}
			d := decision.Of(inv, decision.Input{Able: tc.able})
			counters := 0
			for _, s := range d.Pool {
				counters += len(s.Spec.SharedCounters)
			}
			told := len(d.GPUs) == 1 && strings.Contains(strings.Join(d.GPUs[0].Problems, " "), "A scheduler of the cluster")
			if counters != tc.counters || told != tc.told {
				t.Errorf("%d counter sets, want %d; the scheduler is among the problems: %v, want %v\n%+v", counters, tc.counters, told, tc.told, d.GPUs)
			}
		})
	}
}

// TestPrepareFailure checks what a policy does about refused devices, and when the first of them
// is offered again.
func TestPrepareFailure(t *testing.T) {
	const device = "gpu-11111111"
	retry := time.Date(2026, 11, 28, 9, 0, 0, 0, time.UTC)
	for name, tc := range map[string]struct {
		policy v1alpha1.PrepareFailurePolicy
		now    time.Time
		claims []gpu.DeviceName
		want   resourceapi.DeviceTaintEffect
	}{
		"default":               {"", retry.Add(-time.Second), []gpu.DeviceName{device}, resourceapi.DeviceTaintEffectNoSchedule},
		"taint":                 {"Taint", retry.Add(-time.Second), []gpu.DeviceName{device}, resourceapi.DeviceTaintEffectNoSchedule},
		"evict":                 {v1alpha1.EvictOnPrepareFailure, retry.Add(-time.Second), []gpu.DeviceName{device}, resourceapi.DeviceTaintEffectNoExecute},
		"evict, no claim":       {v1alpha1.EvictOnPrepareFailure, retry.Add(-time.Second), nil, resourceapi.DeviceTaintEffectNoExecute},
		"evict, several claims": {v1alpha1.EvictOnPrepareFailure, retry.Add(-time.Second), []gpu.DeviceName{device, device}, resourceapi.DeviceTaintEffectNoSchedule},
		"the pause has ended":   {v1alpha1.EvictOnPrepareFailure, retry, []gpu.DeviceName{device}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
			inv.Status.GPUs = []v1alpha1.GPU{{UUID: "GPU-11111111-0000-0000-0000-000000000000", ProductName: "NVIDIA L4", Conditions: []v1alpha1.GPUCondition{{
				Type: string(gpu.PrepareFailed), Refused: []string{device}, RetryAt: new(metav1.NewTime(retry)),
			}}}}
			p := policy.Policy{Name: "p", Nodes: labels.Everything(), Health: v1alpha1.HealthPolicy{OnPrepareFailure: tc.policy}}
			d := decision.Of(inv, decision.Input{Policies: []policy.Policy{p}, Allocated: tc.claims, Able: publish.Abilities{Taints: publish.Yes}, Now: tc.now})
			var got resourceapi.DeviceTaintEffect
			for _, x := range d.GPUs[0].Devices[0].Taints {
				got += x.Effect
			}
			if got != tc.want {
				t.Errorf("effect %q, want %q", got, tc.want)
			}
		})
	}
}
