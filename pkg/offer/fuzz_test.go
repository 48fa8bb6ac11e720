package offer_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// FuzzCounters checks the counters of imaginary products: any profiles, at any
// placements, with any engines.
func FuzzCounters(f *testing.F) {
	for seed := range uint64(200) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		m := invented(rand.New(rand.NewPCG(seed, 0)))
		n := offertest.NodeOf(m, 1)
		var all []string
		for _, p := range m.MIG.Profiles {
			all = append(all, p.Name)
		}
		g := build(n, partitioned(all))[0]
		c := newChecker(t, m, n, g)
		if set, bad := c.disagree("", nil, 0); bad {
			t.Errorf("%+v, counters %s: counters and hardware disagree about %v", m.MIG.Profiles, counterText(g), c.names(set))
		}
	})
}

func invented(r *rand.Rand) *nvmlsim.Model {
	m := &nvmlsim.Model{MIG: &nvmlsim.MIGModel{MemorySlices: 1 + r.Uint32N(8)}}
	places := 0
	for i := range 1 + r.IntN(5) {
		p := nvmlsim.Profile{Name: fmt.Sprintf("%dg.1gb", i+1), Size: 1 + r.Uint32N(m.MIG.MemorySlices), InstanceCount: 1 + r.Uint32N(3), OFACount: r.Uint32N(2), DecoderCount: r.Uint32N(3)}
		for start := uint32(0); start+p.Size <= m.MIG.MemorySlices && places < 14; start++ {
			if r.IntN(3) > 0 {
				p.Starts = append(p.Starts, start)
				places++
			}
		}
		m.MIG.Profiles = append(m.MIG.Profiles, p)
		m.Engines.OFA = max(m.Engines.OFA, p.OFACount*p.InstanceCount)
		m.Engines.Decoders = max(m.Engines.Decoders, p.DecoderCount*p.InstanceCount)
	}
	return m
}

// FuzzTables checks that for any report of a node Build doesn't panic, and the
// offered devices have different names.
func FuzzTables(f *testing.F) {
	f.Add(uint8(0), 0, 1, 7, 1, 0, 1)
	f.Add(uint8(1), 1<<30, 1<<30, 1<<30, 1<<30, -5, 1<<30)
	f.Add(uint8(2), -1, 0, -1, -1, 3, 0)
	f.Add(uint8(3), 0, 31, 2, 60000, 31, 1)
	f.Fuzz(func(t *testing.T, what uint8, start, size, instances, engines, otherStart, otherSize int) {
		n := node(t, "h100-80gb", 2)
		mig := n.GPUs[0].MIG
		p := &mig.Profiles[int(what)%len(mig.Profiles)]
		p.MaxInstances, p.Engines.Decoders = instances, engines
		p.Placements = append(p.Placements, gpu.Placement{Start: start, Size: size})
		mig.Instances = []gpu.Instance{{UUID: "MIG-1", Profile: p.Name, Placement: gpu.Placement{Start: otherStart, Size: otherSize}}}
		mig.Enabled, mig.Pending = what&1 != 0, what&1 != 0
		n.GPUs[0].MemoryReservedBytes, p.MemoryBytes = int64(start)<<32, int64(engines)<<20
		for _, plan := range []v1alpha1.Plan{
			{}, {Partitioned: &v1alpha1.PartitionedPlan{}}, {Partitioned: only(p.Name)}, {Partitioned: fix(p.Name, p.Name, "1g.10gb")},
			sharedParts(2, p.Name), sharedLayout(48, p.Name, "1g.10gb", "1g.10gb", "3g.40gb"), equalShares(48), bySize("1", 48), inTurn(64),
		} {
			gpus := build(n, options{
				Server: offer.Server{Counters: what&2 != 0, Multiple: what&4 != 0, Charged: what&8 != 0}, Plan: plan,
				Allocated: []gpu.DeviceName{"gpu-00000001-mps4-1", "gpu-00000001-mig-1g10gb-0-mps", "gpu-00000002-mig-1g10gb-0-mps"},
			})
			if len(gpus) != 2 {
				t.Fatalf("%d GPUs", len(gpus))
			}
			var names []string
			for _, g := range gpus {
				checkRoom(t, g)
				for _, d := range g.Devices {
					checkLimits(t, d)
					names = append(names, d.Name)
				}
			}
			slices.Sort(names)
			if len(slices.Compact(names)) != len(names) {
				t.Errorf("names %v", names)
			}
		}
	})
}

// FuzzShares checks that for any memory and any plan of shares the server can
// store the offer, and the shares together are not larger than the GPU.
func FuzzShares(f *testing.F) {
	f.Add(int64(80<<30), int64(616<<20), int64(1<<30), int32(4), true)
	f.Add(int64(0), int64(0), int64(1), int32(48), true)
	f.Add(int64(1<<62), int64(-1), int64(1<<62), int32(2), false)
	f.Add(int64(200<<20), int64(0), int64(40<<20), int32(2), true)
	f.Fuzz(func(t *testing.T, all, reserved, step int64, shares int32, multiple bool) {
		if all < 0 || step < 1 || shares < 2 || shares > 48 { // no server stores that
			return
		}
		n := node(t, "l4", 1)
		n.GPUs[0].MemoryBytes, n.GPUs[0].MemoryReservedBytes = all, max(0, reserved)
		for _, plan := range []v1alpha1.Plan{equalShares(shares), bySize(fmt.Sprint(step), shares), inTurn(shares), sharedParts(shares)} {
			g := build(n, options{Server: offer.Server{Counters: true, Multiple: multiple, Charged: true}, Plan: plan})[0]
			checkRoom(t, g)
			sum := int64(0)
			for _, d := range g.Devices {
				checkLimits(t, d)
				if *d.Attributes["type"].StringValue == "mps" {
					m := d.Capacity["memory"].Value
					sum += m.Value()
				}
			}
			if sum > max(0, all) {
				t.Errorf("shares of %d bytes of %d", sum, all)
			}
			if len(g.Devices) == 0 || len(g.Devices) == 1 && len(g.Problems) == 0 {
				t.Errorf("%d devices, problems %v", len(g.Devices), g.Problems)
			}
		}
	})
}
