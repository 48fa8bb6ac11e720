package usage

import (
	"cmp"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// room has the parts of a GPU that claims and other programs use, and computes from them
// which partitions still fit.
type room struct {
	profiles []gpu.Profile
	// taken are the partitions that exist for claims, or that others made.
	taken []taken
	// whole: a claim has the GPU undivided, alone or together with others.
	whole bool
}

type taken struct {
	profile   string
	placement gpu.Placement
}

// roomOn returns the room on a GPU that has MIG.
func roomOn(g gpu.GPU, claims []holding.Record) room {
	r := room{profiles: g.MIG.Profiles}
	for _, i := range g.MIG.Instances {
		r.taken = append(r.taken, taken{i.Profile, i.Placement})
	}
	for _, claim := range claims {
		for _, h := range claim.Holdings {
			if h.GPU != g.UUID || h.Admin {
				continue
			}
			p, partition := h.Base().(gpu.Partition)
			r.whole = r.whole || !partition
			t := taken{p.Profile, p.Placement}
			if partition && !slices.Contains(r.taken, t) { // shares of a partition take it once
				r.taken = append(r.taken, t)
			}
		}
	}
	return r
}

// fits returns how many more instances of the profile there can be at once.
func (r room) fits(p gpu.Profile) int {
	free := r.free(p)
	slices.SortFunc(free, func(a, b gpu.Placement) int { return cmp.Compare(a.Start, b.Start) })
	n, end := 0, 0
	for _, at := range free {
		if n == 0 || at.Start >= end {
			n, end = n+1, at.Start+at.Size
		}
	}
	for _, t := range r.taken {
		if t.profile == p.Name {
			p.MaxInstances--
		}
	}
	return max(0, min(n, p.MaxInstances))
}

// free returns the profile's placements that overlap nothing.
func (r room) free(p gpu.Profile) []gpu.Placement {
	if r.whole {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(p.Placements), func(at gpu.Placement) bool {
		return slices.ContainsFunc(r.taken, func(t taken) bool { return t.placement.Overlaps(at) })
	})
}

// fragmentation returns the fraction of the memory slices still usable for partitions that
// the largest possible partition would leave unused; 0 if no partition fits.
func (r room) fragmentation() float64 {
	usable, largest := map[int]bool{}, 0
	for _, p := range r.profiles {
		for _, at := range r.free(p) {
			largest = max(largest, at.Size)
			for i := range at.Size {
				usable[at.Start+i] = true
			}
		}
	}
	if len(usable) == 0 {
		return 0
	}
	return float64(len(usable)-largest) / float64(len(usable))
}
