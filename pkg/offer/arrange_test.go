package offer_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// TestOfferDoesNotDependOnNeighbours gives Build the GPUs of a node in all rotations of
// their indexes: an arrangement that it reuses for the next GPU must be right for that GPU,
// too.
func TestOfferDoesNotDependOnNeighbours(t *testing.T) {
	n := node(t, "h100-80gb", 5)
	// One with another table, one with an instance of others, one with less memory.
	n.GPUs[1].MIG = new(*n.GPUs[1].MIG)
	n.GPUs[1].MIG.Profiles = n.GPUs[1].MIG.Profiles[:3]
	n.GPUs[2].MIG = new(*n.GPUs[2].MIG)
	n.GPUs[2].MIG.Enabled, n.GPUs[2].MIG.Pending = true, true
	n.GPUs[2].MIG.Instances = []gpu.Instance{{UUID: "MIG-1", Profile: "1g.10gb", Placement: gpu.Placement{Start: 1, Size: 1}, GPUInstanceID: 7}}
	n.GPUs[3].MemoryBytes /= 2
	for name, plan := range map[string]v1alpha1.Plan{
		"exclusive": {}, "partitioned": {Partitioned: &v1alpha1.PartitionedPlan{}}, "layout": {Partitioned: fix("1g.10gb", "2g.20gb")},
		"shared partitions": sharedParts(2, "1g.10gb", "3g.40gb"), "shares": equalShares(4), "by size": bySize("1Gi", 8), "replicas": inTurn(3),
	} {
		for _, counters := range []bool{false, true} {
			for claim, allocated := range map[string][]gpu.DeviceName{
				"": nil, "partition": {"gpu-00000001-mig-1g10gb-4"}, "unknown": {"gpu-00000004-mig-9g10gb-0"}, "share": {"gpu-00000005-mps4-1"},
			} {
				o := options{Server: offer.Server{Counters: counters, Multiple: true, Charged: true}, Plan: plan, Allocated: allocated}
				want := withoutPlaces(t, build(n, o))
				for by := range n.GPUs {
					rotated := n
					rotated.GPUs = slices.Clone(n.GPUs)
					for i := range rotated.GPUs {
						rotated.GPUs[i].Index = (i + by) % len(rotated.GPUs)
					}
					if diff := cmp.Diff(want, withoutPlaces(t, build(rotated, o))); diff != "" {
						t.Errorf("%s, counters %t, claim %q, indexes rotated by %d (-want +got):\n%s", name, counters, claim, by, diff)
					}
				}
			}
		}
	}
}

// withoutPlaces sorts an offer by the GPUs' names, and removes what follows from their
// places on the node: their indexes, and the names of their counters, which devices of
// other GPUs must not use.
func withoutPlaces(t *testing.T, offered []offer.GPU) []offer.GPU {
	t.Helper()
	for i := range offered {
		g := &offered[i]
		for _, d := range g.Devices {
			delete(d.Attributes, "index")
			for j, c := range d.ConsumesCounters {
				if c.CounterSet != g.Counters.Name {
					t.Errorf("device %s consumes counters %q, want those of its GPU, %q", d.Name, c.CounterSet, g.Counters.Name)
				}
				d.ConsumesCounters[j].CounterSet = ""
			}
		}
		g.Index = 0
		if g.Counters != nil {
			g.Counters.Name = ""
		}
	}
	slices.SortFunc(offered, func(a, b offer.GPU) int { return strings.Compare(string(a.Name), string(b.Name)) })
	return offered
}
