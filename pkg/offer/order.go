package offer

import (
	"cmp"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// The order of a GPU's devices, where a claim fits several: the scheduler tries
// them in this order and takes the first.
const (
	// largeFirst: large partitions before small ones. Else the smallest that
	// fits is taken.
	largeFirst = false
	// wholeFirst: the whole GPU before its partitions.
	wholeFirst = false
)

// inOrder sorts partitions by profile, and those of one profile so that the
// largest holes are kept. An instance that exists goes first among its like: to
// use it costs no room.
func inOrder(m gpu.MIG, parts []part) []part {
	rank := make(map[gpu.Partition]int, len(parts))
	for _, p := range m.Profiles {
		for i, at := range p.Placements {
			rank[gpu.Partition{GPU: "", Profile: p.Name, Placement: at}] = i
		}
	}
	nvml := func(p part) int {
		return slices.IndexFunc(m.Profiles, func(q gpu.Profile) bool { return q.Name == p.Profile })
	}
	place := func(p part) int {
		if p.exists {
			return -1
		}
		return rank[gpu.Partition{Profile: p.Profile, Placement: p.Placement}]
	}
	return slices.SortedFunc(slices.Values(parts), func(a, b part) int {
		size := cmp.Compare(a.Placement.Size, b.Placement.Size)
		if largeFirst {
			size = -size
		}
		return cmp.Or(size, cmp.Compare(b.profile.MaxInstances, a.profile.MaxInstances), cmp.Compare(nvml(a), nvml(b)),
			cmp.Compare(place(a), place(b)), cmp.Compare(a.Placement.Start, b.Placement.Start))
	})
}
