package offer_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestWhatClaimsHaveStays tests every product: for any claims, foreign
// instances, plan, mode and server, the devices of claims are offered, and no
// two devices that share silicon can be allocated, except those that claims
// already have.
func TestWhatClaimsHaveStays(t *testing.T) {
	for _, m := range migModels(t) {
		t.Run(m.ID, func(t *testing.T) {
			for seed := range uint64(200) {
				r := rand.New(rand.NewPCG(seed, 1))
				n := node(t, m.ID, 1)
				meddle(r, &n.GPUs[0])
				have := someDevices(r, n.GPUs[0])
				o := options{Server: offer.Server{Counters: r.IntN(2) == 0, Multiple: r.IntN(2) == 0, Charged: r.IntN(2) == 0}}
				o.Plan = somePlan(r, m)
				for _, d := range have {
					o.Allocated = append(o.Allocated, name(t, n, d))
				}
				g := build(n, o)[0]
				checkKept(t, newChecker(t, m, n, g), have, o.Counters)
				for _, l := range g.Leftover {
					if !slices.Contains(o.Allocated, l) {
						t.Errorf("%s is left over, and no claim has it", l)
					}
				}
				if t.Failed() {
					t.Fatalf("seed %d: %+v, plan %+v, claims have %v, counters %s", seed, *n.GPUs[0].MIG, o.Plan, o.Allocated, counterText(g))
				}
			}
		})
	}
}

func checkKept(t *testing.T, c *checker, have []gpu.Device, counters bool) {
	t.Helper()
	for _, d := range have {
		if !slices.Contains(c.devices, d) {
			t.Errorf("%v is gone", d)
		}
	}
	for i, a := range c.devices {
		for j, b := range c.devices[:i] {
			claimed := slices.Contains(have, a) && slices.Contains(have, b)
			apart := counters && !c.counters.allow([]int{i, j}, "")
			if c.overlap[i][j] && !apart && !claimed {
				t.Errorf("%v and %v can both be had", a, b)
			}
		}
	}
}

// meddle lets others switch the mode and make instances.
func meddle(r *rand.Rand, g *gpu.GPU) {
	if r.IntN(3) == 0 {
		for range r.IntN(4) {
			p := g.MIG.Profiles[r.IntN(len(g.MIG.Profiles))]
			at := p.Placements[r.IntN(len(p.Placements))]
			if !slices.ContainsFunc(g.MIG.Instances, func(i gpu.Instance) bool { return i.Placement.Overlaps(at) }) {
				instance(g, p.Name, at.Start)
			}
		}
	}
	g.MIG.Enabled, g.MIG.Pending, g.MIG.Switchable = r.IntN(3) == 0, r.IntN(3) == 0, r.IntN(3) > 0
}

// someDevices that don't overlap; of others' instances too.
func someDevices(r *rand.Rand, g gpu.GPU) []gpu.Device {
	whole := gpu.Whole{GPU: g.UUID}
	switch r.IntN(8) {
	case 0:
		return []gpu.Device{whole}
	case 1:
		return []gpu.Device{gpu.Share{Of: whole, Count: 4, Number: 1}, gpu.Share{Of: whole, Count: 4, Number: 2}}
	case 2:
		return []gpu.Device{gpu.Share{Of: whole}}
	case 3:
		return []gpu.Device{gpu.Replica{GPU: g.UUID, Count: 2, Number: 1}}
	}
	var have []gpu.Device
	for range r.IntN(5) {
		p := g.MIG.Profiles[r.IntN(len(g.MIG.Profiles))]
		var d gpu.Device = gpu.Partition{GPU: g.UUID, Profile: p.Name, Placement: p.Placements[r.IntN(len(p.Placements))]}
		switch r.IntN(4) {
		case 0:
			d = gpu.Share{Of: d}
		case 1:
			d = gpu.Share{Of: d, Count: 2, Number: r.IntN(2)}
		}
		if !slices.ContainsFunc(have, func(h gpu.Device) bool { return gpu.Conflict(h, d) }) {
			have = append(have, d)
		}
	}
	return have
}

func somePlan(r *rand.Rand, m *nvmlsim.Model) v1alpha1.Plan {
	var profiles []string
	for range 1 + r.IntN(4) {
		profiles = append(profiles, m.MIG.Profiles[r.IntN(len(m.MIG.Profiles))].Name)
	}
	return []v1alpha1.Plan{
		{}, {Partitioned: &v1alpha1.PartitionedPlan{}}, {Partitioned: only(profiles...)}, {Partitioned: fix(profiles...)},
		sharedParts(2, profiles...), sharedLayout(2, profiles...), equalShares(4), equalShares(2), bySize("1Gi", 16), inTurn(2), inTurn(64),
	}[r.IntN(11)]
}
