package offer_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// TestTaints checks that all devices of a GPU have the taints of its conditions if the
// server stores taints, and that otherwise a GPU that can't be used isn't offered.
func TestTaints(t *testing.T) {
	reset := gpu.Condition{Type: gpu.ResetRequired, Since: time.Unix(1, 0)}
	lost := gpu.Condition{Type: gpu.Lost, Since: time.Unix(2, 0), ByPolicy: gpu.NoExecute}
	inspect := gpu.Condition{Type: gpu.NeedsInspection, Since: time.Unix(3, 0)}
	remap := gpu.Condition{Type: gpu.RowRemapPending, Since: time.Unix(4, 0)}
	mps := gpu.Condition{Type: gpu.MPSDaemonFailed, Since: time.Unix(5, 0)}
	noWhole := remap
	noWhole.ByPolicy = gpu.NoSchedule
	all, withoutNone := offer.Server{Counters: true, MaxTainted: 64, InformationalTaints: true}, offer.Server{Counters: true, MaxTainted: 64}
	for name, tc := range map[string]struct {
		conditions  []gpu.Condition
		server      offer.Server
		offered     bool
		whole, part string
	}{
		"healthy":                 {nil, all, true, "", ""},
		"reset":                   {[]gpu.Condition{reset}, all, true, "ResetRequired:NoSchedule@1", "ResetRequired:NoSchedule@1"},
		"worst first":             {[]gpu.Condition{inspect, reset, lost}, all, true, "Lost:NoExecute@2 ResetRequired:NoSchedule@1 NeedsInspection:None@3", "Lost:NoExecute@2 ResetRequired:NoSchedule@1 NeedsInspection:None@3"},
		"no effect None":          {[]gpu.Condition{inspect, reset}, withoutNone, true, "ResetRequired:NoSchedule@1", "ResetRequired:NoSchedule@1"},
		"only informs":            {[]gpu.Condition{inspect}, withoutNone, true, "", ""},
		"whole GPU by policy":     {[]gpu.Condition{noWhole}, all, true, "RowRemapPending:NoSchedule@4", "RowRemapPending:None@4"},
		"whole GPU":               {[]gpu.Condition{remap}, all, true, "RowRemapPending:None@4", "RowRemapPending:None@4"},
		"MPS":                     {[]gpu.Condition{mps}, all, true, "", ""},
		"no device's concern":     {[]gpu.Condition{{Type: gpu.CDIFailed}}, all, true, "", ""},
		"no taints":               {[]gpu.Condition{reset}, offer.Server{Counters: true}, false, "", ""},
		"no taints, MPS":          {[]gpu.Condition{mps}, offer.Server{Counters: true}, true, "", ""},
		"no taints, rows wait":    {[]gpu.Condition{noWhole}, offer.Server{Counters: true}, true, "", ""},
		"no taints, only informs": {[]gpu.Condition{inspect}, offer.Server{Counters: true}, true, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := node(t, "h100-80gb", 2)
			n.GPUs[0].Conditions = tc.conditions
			offered := build(n, options{Server: tc.server, Plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}})
			healthy := offered[len(offered)-1]
			if healthy.UUID != n.GPUs[1].UUID || taints(healthy) != "" {
				t.Errorf("the other GPU is offered with taints %q", taints(healthy))
			}
			if got := len(offered) == 2; got != tc.offered {
				t.Fatalf("offered: %t", got)
			}
			if !tc.offered {
				return
			}
			want := make([]string, len(offered[0].Devices))
			for i := range want {
				want[i] = tc.part
			}
			want[0] = tc.whole
			if diff := cmp.Diff(strings.TrimRight(strings.Join(want, "\n"), "\n"), taints(offered[0])); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// taints prints those of each device on a line; empty if there are none.
func taints(g offer.GPU) string {
	lines := make([]string, 0, len(g.Devices))
	for _, d := range g.Devices {
		var all []string
		for _, x := range d.Taints {
			if x.Key != "gpu.nvidia.com/unhealthy" {
				return "wrong key " + x.Key
			}
			all = append(all, fmt.Sprintf("%s:%s@%d", x.Value, x.Effect, x.TimeAdded.Unix()))
		}
		lines = append(lines, strings.Join(all, " "))
	}
	return strings.TrimRight(strings.Join(lines, "\n"), "\n")
}

// TestTaintsOfShares checks that an MPS daemon that fails keeps new claims off shares and
// off nothing else.
func TestTaintsOfShares(t *testing.T) {
	n := node(t, "h100-80gb", 1)
	n.GPUs[0].Conditions = []gpu.Condition{{Type: gpu.MPSDaemonFailed, Since: time.Unix(5, 0)}}
	got := build(n, options{Server: offer.Server{Counters: true, MaxTainted: 64}, Plan: v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: new(int32(2))}}})
	want := map[string]int{"gpu-00000001": 0, "gpu-00000001-mps2-0": 1, "gpu-00000001-mps2-1": 1}
	taints := map[string]int{}
	for _, d := range got[0].Devices {
		taints[d.Name] = len(d.Taints)
	}
	if diff := cmp.Diff(want, taints); diff != "" {
		t.Errorf("devices with taints (-want +got):\n%s", diff)
	}
}

// TestBlockedDevicesWithoutTaints checks that where devices can't have taints, those that
// a condition blocks aren't offered, and those of claims stay for no other claim.
func TestBlockedDevicesWithoutTaints(t *testing.T) {
	mps := gpu.Condition{Type: gpu.MPSDaemonFailed}
	noWhole := gpu.Condition{Type: gpu.RowRemapPending, ByPolicy: gpu.NoSchedule}
	const whole, first, second = "gpu-00000001", "gpu-00000001-mps2-0", "gpu-00000001-mps2-1"
	for name, tc := range map[string]struct {
		conditions []gpu.Condition
		claimed    gpu.DeviceName
		want       map[string]string // type by device
	}{
		"healthy":           {nil, first, map[string]string{whole: "gpu", first: "mps", second: "mps"}},
		"MPS":               {[]gpu.Condition{mps}, "", map[string]string{whole: "gpu"}},
		"MPS, in use":       {[]gpu.Condition{mps}, first, map[string]string{whole: "gpu", first: "leftover"}},
		"rows wait":         {[]gpu.Condition{noWhole}, "", map[string]string{first: "mps", second: "mps"}},
		"rows wait, in use": {[]gpu.Condition{noWhole}, whole, map[string]string{whole: "leftover", first: "mps", second: "mps"}},
		"both":              {[]gpu.Condition{noWhole, mps}, "", map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			n := node(t, "h100-80gb", 1)
			n.GPUs[0].Conditions = tc.conditions
			got := build(n, options{
				Server: offer.Server{Counters: true}, Plan: v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: new(int32(2))}},
				Allocated: []gpu.DeviceName{tc.claimed},
			})
			types := map[string]string{}
			for _, d := range got[0].Devices {
				types[d.Name] = *d.Attributes["type"].StringValue
			}
			if diff := cmp.Diff(tc.want, types); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if len(got[0].Leftover) > 0 {
				t.Errorf("the plan would remove %v", got[0].Leftover)
			}
		})
	}
}

// TestUnknownGPUIsNotTainted checks that a GPU of which too little is known to describe
// it isn't offered, taint or not.
func TestUnknownGPUIsNotTainted(t *testing.T) {
	n := node(t, "h100-80gb", 1)
	n.GPUs[0].Model = gpu.Model{}
	n.GPUs[0].Conditions = []gpu.Condition{{Type: gpu.Unreadable}}
	if got := build(n, options{Server: offer.Server{Counters: true, MaxTainted: 64}}); len(got) != 0 {
		t.Errorf("offered: %v", got)
	}
}
