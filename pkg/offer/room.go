package offer

import (
	"maps"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// room has the resources of a GPU for new partitions: all of them minus those
// of existing instances.
type room struct {
	// slices is how many memory slices there are: placements are in [0, slices).
	slices int
	taken  []gpu.Placement
	// engines that are left, by kind as units lists them.
	engines []int
	// instances that are left of each profile.
	instances map[string]int
}

// newRoom reads a GPU's tables. NVML doesn't say how many engines a GPU has for
// MIG, but that so many instances of a profile can exist at once: there are at
// least that many times the profile's engines, and never more are used.
func newRoom(m gpu.MIG) room {
	r := room{engines: make([]int, len(units(gpu.Engines{}))), instances: make(map[string]int)}
	for _, p := range m.Profiles {
		for _, at := range p.Placements {
			r.slices = max(r.slices, at.Start+at.Size)
		}
		for i, u := range units(p.Engines) {
			r.engines[i] = max(r.engines[i], u.count*p.MaxInstances)
		}
		r.instances[p.Name] = p.MaxInstances
	}
	for _, i := range m.Instances {
		r.slices = max(r.slices, i.Placement.Start+i.Placement.Size)
		if at := slices.IndexFunc(m.Profiles, func(p gpu.Profile) bool { return p.Name == i.Profile }); at >= 0 {
			r = r.without(m.Profiles[at], i.Placement)
		} else {
			r.taken = append(r.taken, i.Placement)
		}
	}
	return r
}

// has reports whether an instance of the profile can be made at a place.
func (r room) has(p gpu.Profile, at gpu.Placement) bool {
	if r.instances[p.Name] < 1 || slices.ContainsFunc(r.taken, at.Overlaps) {
		return false
	}
	for i, u := range units(p.Engines) {
		if u.count > max(0, r.engines[i]) {
			return false
		}
	}
	return true
}

// without is the room that such an instance leaves.
func (r room) without(p gpu.Profile, at gpu.Placement) room {
	r.taken = append(slices.Clip(r.taken), at)
	r.engines = slices.Clone(r.engines)
	for i, u := range units(p.Engines) {
		r.engines[i] -= u.count
	}
	r.instances = maps.Clone(r.instances)
	r.instances[p.Name]--
	return r
}
