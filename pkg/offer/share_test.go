package offer_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// TestSharesThatCannotBe tests plans for shares and replicas that can't be
// carried out, and expects a reason and a remedy.
func TestSharesThatCannotBe(t *testing.T) {
	poor := func(mib int64) func(*gpu.GPU) { return func(g *gpu.GPU) { g.MemoryBytes = mib << 20 } }
	pascal := func(g *gpu.GPU) {
		g.MIG, g.Model.ProductName, g.Model.CUDAComputeCapability = nil, "Tesla P100-PCIE-16GB", "6.0"
	}
	turing := func(g *gpu.GPU) {
		g.MIG, g.Model.ProductName, g.Model.CUDAComputeCapability = nil, "NVIDIA GeForce RTX 2080 Ti", "7.5"
	}
	longTurns := func(p v1alpha1.Plan) v1alpha1.Plan {
		p.TimeSliced.Interval = v1alpha1.LongTimeSlice
		return p
	}
	for name, tc := range map[string]struct {
		gpu       func(*gpu.GPU) // changes an H100 in its initial state
		plan      v1alpha1.Plan
		single    bool // a server without consumable capacity
		allocated []string
		want      offered
	}{
		"MPS, others switched MIG on":                {gpu: on, plan: equalShares(2), want: offered{Problem: "(spec.plan.partitioned.mps)"}},
		"MPS, others made an instance":               {gpu: other("3g.40gb", 4), plan: bySize("1Gi", 2), want: offered{Devices: "3g40gb-4", Problem: "others have put it into MIG mode"}},
		"in turn, others made an instance":           {gpu: other("3g.40gb", 4), plan: inTurn(2), want: offered{Devices: "3g40gb-4", Problem: "can't be time-sliced"}},
		"MPS, no MIG":                                {gpu: func(g *gpu.GPU) { g.MIG = nil }, plan: equalShares(2), want: offered{Devices: "whole mps2-0 mps2-1"}},
		"MPS, tables that make no sense":             {gpu: func(g *gpu.GPU) { g.MIG.Profiles[3].MaxInstances = -1 }, plan: equalShares(2), want: offered{Devices: "whole mps2-0 mps2-1", Problem: "make no sense"}},
		"too little memory":                          {gpu: poor(130), plan: equalShares(4), want: offered{Devices: "whole", Problem: "Plan fewer (spec.plan.mps)"}},
		"too little memory, by size":                 {gpu: poor(128), plan: bySize("1Gi", 2), want: offered{Devices: "whole", Problem: "too little memory"}},
		"memory that isn't known":                    {gpu: poor(0), plan: equalShares(4), want: offered{Devices: "whole", Problem: "doesn't say how much memory it has"}},
		"memory that isn't known, by size":           {gpu: poor(0), plan: bySize("1Gi", 2), want: offered{Devices: "whole", Problem: "plan it timeSliced"}},
		"memory that isn't known, in turn":           {gpu: poor(0), plan: inTurn(2), want: offered{Devices: "whole ts2-0 ts2-1"}},
		"less memory than a step":                    {gpu: poor(1000), plan: bySize("1Gi", 2), want: offered{Devices: "whole", Problem: "is less than spec.plan.mps.consumable.memoryStep, 1Gi"}},
		"a step of one byte":                         {gpu: poor(130), plan: bySize("1", 2), want: offered{Devices: "whole mps"}},
		"a step that is rounded up beyond all of it": {gpu: poor(129), plan: bySize("1048577", 2), want: offered{Devices: "whole", Problem: "memoryStep"}},
		"more replicas than there is room for":       {plan: inTurn(64), want: offered{Devices: strings.Join(numbered("ts64-%d", 64), " "), Problem: "beside 64 replicas"}},
		"as many replicas as there is room for":      {plan: inTurn(63), want: offered{Devices: "whole " + strings.Join(numbered("ts63-%d", 63), " ")}},
		"MPS before Volta":                           {gpu: pascal, plan: equalShares(2), want: offered{Devices: "whole", Problem: "compute capability 7.0 (Volta) or later, and a Tesla P100-PCIE-16GB has 6.0. It is offered whole"}},
		"MPS before Volta, by size":                  {gpu: pascal, plan: bySize("1Gi", 2), want: offered{Devices: "whole", Problem: "plan it timeSliced with interval Default"}},
		"in turn before Volta":                       {gpu: pascal, plan: inTurn(2), want: offered{Devices: "whole ts2-0 ts2-1"}},
		"long turns before Volta":                    {gpu: pascal, plan: longTurns(inTurn(2)), want: offered{Devices: "whole", Problem: "can't be made Long (spec.plan.timeSliced.interval)"}},
		"partitions before Volta":                    {gpu: pascal, plan: sharedParts(2), want: offered{Devices: "whole", Problem: "no MIG"}},
		"MPS on Turing":                              {gpu: turing, plan: equalShares(2), want: offered{Devices: "whole mps2-0 mps2-1"}},
		"long turns on Turing":                       {gpu: turing, plan: longTurns(inTurn(2)), want: offered{Devices: "whole ts2-0 ts2-1"}},
		"partitions, no MIG":                         {gpu: func(g *gpu.GPU) { g.MIG = nil }, plan: sharedParts(2), want: offered{Devices: "whole", Problem: "no MIG"}},
		"partitions with too little memory": {gpu: func(g *gpu.GPU) { g.MIG.Profiles[0].MemoryBytes = 130 << 20 }, plan: sharedParts(4, "1g.10gb", "3g.40gb"),
			want: offered{Devices: "whole 3g40gb-0-mps 3g40gb-4-mps", Problem: "Profile 1g.10gb has too little memory for 4 MPS shares"}},
		"others' instances are shared too": {gpu: other("3g.40gb", 4), plan: sharedParts(2, "3g.40gb"), want: offered{Devices: "3g40gb-4-mps 3g40gb-0-mps"}},
		"on demand, one at a time":         {plan: sharedParts(2, "3g.40gb"), single: true, want: offered{Devices: "whole", Problem: "DRAConsumableCapacity"}},
		"layout, more shares than there is room for": {plan: sharedLayout(48, "1g.10gb", "1g.10gb", "3g.40gb"), single: true,
			want: offered{Devices: strings.Join(append(numbered("1g10gb-4-mps48-%d", 48), numbered("1g10gb-5-mps48-%d", 48)...), " "), Problem: "144 MPS shares"}},
		"a share of a partition that isn't listed": {plan: equalShares(2), allocated: []string{"1g18gb-0-mps"}, want: offered{Problem: "gpu-00000001-mig-1g18gb-0-mps, which a claim has"}},
		"a share that claims have, then one at a time": {plan: sharedParts(2, "3g.40gb"), single: true, allocated: []string{"3g40gb-4-mps"},
			want: offered{Devices: "whole 3g40gb-4-mps", Leftover: "3g40gb-4-mps", Problem: "DRAConsumableCapacity"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := node(t, "h100-80gb", 1)
			if tc.gpu != nil {
				tc.gpu(&n.GPUs[0])
			}
			o := options{Server: offer.Server{Counters: true, Multiple: !tc.single, Charged: true, Version: "v1.37.1"}, Plan: tc.plan}
			for _, a := range tc.allocated {
				o.Allocated = append(o.Allocated, long(a))
			}
			got := build(n, o)[0]
			problems := got.Problems
			if got.WithoutWhole != "" {
				problems = append(problems, got.WithoutWhole)
			}
			checkProblem(t, problems, tc.want.Problem)
			tc.want.Problem = ""
			checkLeftover(t, got)
			checkRoom(t, got)
			for _, d := range got.Devices {
				checkLimits(t, d)
				if tc.single && d.AllowMultipleAllocations != nil {
					t.Errorf("device %s: the server would drop that it can be allocated several times", d.Name)
				}
			}
			if diff := cmp.Diff(tc.want, inShort(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestUnknownMemory checks that a GPU whose memory isn't known is offered with all selectors
// can ask for, and that a counter keeps it apart from its replicas.
func TestUnknownMemory(t *testing.T) {
	n := node(t, "l4", 1)
	n.GPUs[0].MemoryBytes, n.GPUs[0].MemoryReservedBytes = 0, 0
	g := build(n, options{Server: offer.Server{Counters: true, Multiple: true, Charged: true}, Plan: inTurn(2)})[0]
	var takes []int64
	for _, d := range g.Devices {
		checkLimits(t, d)
		if c, ok := d.Capacity[gpu.MemoryCapacity]; !ok || !c.Value.IsZero() {
			t.Errorf("device %s has memory %v, want 0, so that a selector on it doesn't fail", d.Name, d.Capacity)
		}
		c := d.ConsumesCounters[0].Counters["memory"].Value
		takes = append(takes, c.Value())
	}
	if there := g.Counters.Counters["memory"].Value; !slices.Equal(takes, []int64{2, 1, 1}) || there.Value() != 2 {
		t.Errorf("whole GPU and replicas consume %v of %s, want all or one of 2", takes, there.String())
	}
}

func numbered(format string, n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf(format, i))
	}
	return out
}

// A claim's partition comes on top of as many as there is room for: no product
// has so many, but a node's report might.
func TestNoMoreDevicesThanThereIsRoomFor(t *testing.T) {
	n := node(t, "h100-80gb", 1)
	m := n.GPUs[0].MIG
	m.Profiles = nil
	for i := range 21 {
		p := gpu.Profile{Name: fmt.Sprintf("%dg.1gb", i+1), MaxInstances: 3, MemoryBytes: 1 << 30}
		for j := range 3 {
			p.Placements = append(p.Placements, gpu.Placement{Start: (i + 8*j) % 24, Size: 1})
		}
		m.Profiles = append(m.Profiles, p)
	}
	var all []string
	for _, p := range m.Profiles {
		all = append(all, p.Name)
	}
	plan := sharedParts(2, all...)
	o := options{Server: offer.Server{Counters: true, Multiple: true, Charged: true}, Plan: plan, Allocated: []gpu.DeviceName{long("21g1gb-20"), long("21g1gb-4-mps")}}
	g := build(n, o)[0]
	checkRoom(t, g)
	for _, d := range o.Allocated {
		if !slices.ContainsFunc(g.Devices, func(have resourceapi.Device) bool { return have.Name == string(d) }) {
			t.Errorf("%s is gone", d)
		}
	}
}
