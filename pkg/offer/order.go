package offer

import (
	"cmp"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// inOrder sorts partitions in the order in which they should be allocated: the
// scheduler tries them in this order and takes the first that fits. By
// measurement, claims for devices late in the list are more expensive. Small
// profiles come first: filling a GPU takes many small claims, and a claim that
// fits a small partition should get it. Among profiles of one size, the one
// with more instances comes first; the placements of one profile are ordered to
// keep the largest free areas. An existing instance comes first among equal
// ones, because it needs no further room.
func inOrder(m gpu.MIG, parts []part) []part { return inThatOrder(parts, order(m, parts)) }

// order returns the positions of the partitions that inOrder sorts.
func order(m gpu.MIG, parts []part) []int {
	rank := ranks(parts)
	nvml := func(p part) int {
		return slices.IndexFunc(m.Profiles, func(q gpu.Profile) bool { return q.Name == p.Profile })
	}
	positions := make([]int, len(parts))
	for i := range positions {
		positions[i] = i
	}
	slices.SortFunc(positions, func(x, y int) int {
		a, b := parts[x], parts[y]
		return cmp.Or(cmp.Compare(a.Placement.Size, b.Placement.Size), cmp.Compare(b.profile.MaxInstances, a.profile.MaxInstances),
			cmp.Compare(nvml(a), nvml(b)), falseFirst(!a.exists, !b.exists), cmp.Compare(rank[a.Partition], rank[b.Partition]),
			falseFirst(a.shared, b.shared))
	})
	return positions
}

func inThatOrder(parts []part, positions []int) []part {
	out := make([]part, len(positions))
	for i, at := range positions {
		out[i] = parts[at]
	}
	return out
}

// falseFirst compares two booleans.
func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// ranks says in which order partitions of a profile should be given away: the
// order in which, summed over its steps, the most of the largest partitions
// stay possible, then of the next smaller ones, and so on.
//
// On a GPU of eight memory slices, 1g goes to 4, 5, 6 and then 0 to 3: the
// second half has room for three of them or a 3g, the first for four of them or
// a 3g or a 4g. Without 4g on offer the first half goes first, because four
// find room in it before the other 3g is lost.
func ranks(parts []part) map[gpu.Partition]int {
	all := make([]gpu.Placement, 0, len(parts))
	for _, p := range parts {
		all = append(all, p.Placement)
	}
	out := make(map[gpu.Partition]int, len(parts))
	for _, like := range byProfile(parts) {
		for n, p := range bestOrder(all, like) {
			out[p.Partition] = n
		}
	}
	return out
}

func byProfile(parts []part) map[string][]part {
	out := make(map[string][]part)
	for _, p := range parts {
		out[p.Profile] = append(out[p.Profile], p)
	}
	return out
}

// maxOrdered limits the placements of one profile for which the best order is
// computed, which takes time and memory for each subset of them. No product has
// more than 7.
const maxOrdered = 10

// bestOrder examines every subset of like once: the partitions that remain
// possible next to a subset don't depend on the order of its allocation. Of
// equally good orders it takes the one with the lower slices first.
func bestOrder(all []gpu.Placement, like []part) []part {
	like = slices.SortedFunc(slices.Values(like), func(a, b part) int { return cmp.Compare(a.Placement.Start, b.Placement.Start) })
	if len(like) > maxOrdered {
		return like
	}
	type order struct {
		given []int
		sum   []int // of the remaining partitions after each step
	}
	subsets := make([]order, 1<<len(like))
	given := make([]gpu.Placement, 0, len(like))
	for set := range subsets {
		given = given[:0]
		last := -1
		for i := range like {
			if set&(1<<i) == 0 {
				continue
			}
			given = append(given, like[i].Placement)
			if last < 0 || slices.Compare(subsets[set&^(1<<i)].sum, subsets[set&^(1<<last)].sum) >= 0 {
				last = i
			}
		}
		subsets[set].sum = left(all, given)
		if last >= 0 {
			before := subsets[set&^(1<<last)]
			subsets[set].given = append(slices.Clip(before.given), last)
			add(subsets[set].sum, before.sum)
		}
	}
	var out []part
	for _, i := range subsets[len(subsets)-1].given {
		out = append(out, like[i])
	}
	return out
}

func add(to, n []int) {
	for i := range to {
		to[i] += n[i]
	}
}

// left counts the partitions that can still be created beside the given ones, by size,
// the largest first.
func left(all, given []gpu.Placement) []int {
	largest := 0
	for _, p := range all {
		largest = max(largest, p.Size)
	}
	n := make([]int, largest+1)
	for _, p := range all {
		if !slices.ContainsFunc(given, p.Overlaps) {
			n[largest-p.Size]++
		}
	}
	return n
}
