package offer

import (
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// byDefault reports whether a profile is offered where a plan lists none. The
// scheduler's time goes with the number of devices and counters, so these are
// the plain profiles that make a part of the GPU: without those that differ
// only in media engines or graphics, and without the one that is the whole GPU
// again, where the whole GPU is offered.
func byDefault(m gpu.MIG, p gpu.Profile, whole bool) bool {
	return plain(p) && (!whole || !takesAll(m, p))
}

// plain reports whether a profile is no variant: "1g.24gb", not "1g.24gb+gfx".
func plain(p gpu.Profile) bool { return !strings.ContainsAny(p.Name, "+-") }

// takesAll reports whether an instance of the profile leaves no room for another.
func takesAll(m gpu.MIG, p gpu.Profile) bool {
	return !slices.ContainsFunc(p.Placements, func(at gpu.Placement) bool { return at.Size < newRoom(m).slices })
}

// defaultProfiles are those of a plan that lists none, in NVML's order.
func (o *draft) defaultProfiles() []gpu.Profile {
	return slices.DeleteFunc(slices.Clone(o.mig.Profiles), func(p gpu.Profile) bool { return !byDefault(o.mig, p, o.whole) })
}
