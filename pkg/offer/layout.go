package offer

import (
	"cmp"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// planLayout offers a fixed partitioning: each item once, at a place of its own.
// Instances of others that are of an item's profile stand for it.
func (o *draft) planLayout(items []string) {
	spare := make(map[string]int)
	for _, p := range o.parts {
		spare[p.Profile]++
	}
	var fitting []gpu.Profile
	var placed []part
	for i, name := range items {
		p, ok := o.profileNamed(name)
		switch {
		case !ok:
			o.problem("It has no profile %s (spec.plan.partitioned.layout[%d]), which is left out; it has %s.", name, i, o.profileNames())
		case spare[name] > 0:
			spare[name]--
		default:
			try, ok := o.pack(append(slices.Clip(fitting), p))
			if !ok {
				o.problem("There is no room for the %s of spec.plan.partitioned.layout[%d] beside the others, and it is left out.", name, i)
				continue
			}
			fitting, placed = append(fitting, p), try
		}
	}
	o.parts = append(o.parts, placed...)
	o.whole = o.whole && len(o.parts) == 0
}

// pack finds a place for each profile, the large ones first; the same profiles
// are always packed the same way.
func (o *draft) pack(profiles []gpu.Profile) ([]part, bool) {
	sorted := slices.SortedStableFunc(slices.Values(profiles), func(a, b gpu.Profile) int {
		return cmp.Or(cmp.Compare(size(b), size(a)), cmp.Compare(a.Name, b.Name))
	})
	return o.packRest(o.room, sorted, 0)
}

// packRest places profiles[0] at or after its placement number from, and the
// others after it. Equal profiles are placed in the order of their placements,
// so that no arrangement is tried twice.
func (o *draft) packRest(r room, profiles []gpu.Profile, from int) ([]part, bool) {
	if len(profiles) == 0 {
		return nil, true
	}
	p := profiles[0]
	for i := from; i < len(p.Placements); i++ {
		at := p.Placements[i]
		if !r.has(p, at) {
			continue
		}
		next := 0
		if len(profiles) > 1 && profiles[1].Name == p.Name {
			next = i + 1
		}
		if rest, ok := o.packRest(r.without(p, at), profiles[1:], next); ok {
			return append([]part{{Partition: o.partitionAt(p, at), profile: p}}, rest...), true
		}
	}
	return nil, false
}

// size of a profile in memory slices.
func size(p gpu.Profile) int {
	if len(p.Placements) == 0 {
		return 0
	}
	return p.Placements[0].Size
}
