// Package rank decides how many PreferNoSchedule taints each node has, so that the stock scheduler
// fills nodes that are in use before it breaks unused ones, and which nodes are the reserve for
// pods that need all GPUs of a node.
//
// It is pure: the same nodes give the same ranks. It keeps nothing in mind but what it is told of
// each node: whether it is in the reserve already.
package rank

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// Node is what ranks follow from.
type Node struct {
	Name string
	// Pool is the group of nodes that the node is compared with.
	Pool string
	// GPUs counts those that are offered whole, also those that claims have.
	GPUs int
	// Free counts those of them that are wholly free, and healthy.
	Free int
	// OneClaim: one claim has all of them.
	OneClaim bool
	// FreeCPU is what pods have not asked for, in thousandths.
	FreeCPU int64
	// Decided is the rank that was decided last, or that the node's taints say.
	Decided Rank
	// Away: no pod can come to the node now, or nothing is known of it. It keeps its rank, and
	// others don't depend on it.
	Away bool
}

// Rank says how little the scheduler should like a node.
type Rank struct {
	// Taints is how many PreferNoSchedule taints the node has.
	Taints int
	// Hard: pods that don't tolerate it are kept off the node.
	Hard bool
}

// Reserve reports whether the node is in the reserve: it has more taints than any other.
func (r Rank) Reserve() bool { return r.Taints == ReserveTaints }

// String names the rank for people; empty for none.
func (r Rank) String() string {
	switch {
	case r.Hard:
		return "hard reserve"
	case r.Reserve():
		return "reserve"
	case r.Taints > 0:
		return fmt.Sprintf("rank %d", r.Taints)
	}
	return ""
}

// Relaxes reports whether r keeps fewer pods off than other does, in one way at least.
func (r Rank) Relaxes(other Rank) bool { return r.Taints < other.Taints || !r.Hard && other.Hard }

// ReserveTaints is how many taints a node of the reserve has.
const ReserveTaints = 6

// steps say how many taints a node has outside the reserve, by how much of it is free: at least so
// many eighths of its GPUs. The scheduler's score falls by the same amount for each taint.
func steps() []step { return []step{{8, 4}, {6, 2}, {3, 1}} }

type step struct{ eighths, taints int }

// share of the nodes with the most GPUs is in the reserve: one of so many, rounded up.
const share = 10

// Decide returns the ranks of all nodes that aren't away. In each pool, only nodes with the largest
// count of GPUs have one above zero, and none where that count is one. hard is how many nodes of
// each pool's unused reserve are Hard.
func Decide(nodes []Node, hard int) map[string]Rank {
	pools := make(map[string][]Node)
	ranks := make(map[string]Rank, len(nodes))
	for _, n := range nodes {
		if !n.Away {
			pools[n.Pool] = append(pools[n.Pool], n)
			ranks[n.Name] = Rank{}
		}
	}
	for _, pool := range pools {
		maps.Copy(ranks, largest(pool, hard))
	}
	return ranks
}

// largest ranks the nodes of a pool that have the most GPUs.
func largest(pool []Node, hard int) map[string]Rank {
	most := slices.MaxFunc(pool, func(a, b Node) int { return cmp.Compare(a.GPUs, b.GPUs) }).GPUs
	if most < 2 {
		return nil
	}
	pool = slices.DeleteFunc(slices.Clone(pool), func(n Node) bool { return n.GPUs < most })
	ranks := make(map[string]Rank, len(pool))
	for _, n := range pool {
		ranks[n.Name] = Rank{Taints: taints(n)}
	}
	size := max((len(pool)+share-1)/share, hard, countUnused(pool, Rank.Reserve)) // unused members stay
	reserve := members(pool, Rank.Reserve, size)
	for _, n := range reserve {
		ranks[n.Name] = Rank{Taints: ReserveTaints}
	}
	for _, n := range members(reserve, isHard, hard) {
		ranks[n.Name] = Rank{Taints: ReserveTaints, Hard: true}
	}
	return ranks
}

// taints of a node outside the reserve.
func taints(n Node) int {
	for _, s := range steps() {
		if n.Free*8 >= n.GPUs*s.eighths {
			return s.taints
		}
	}
	return 0
}

// members chooses from nodes those that are to be members. Members of which one claim has all GPUs
// stay, and don't count. The others are unused, as many as size: members first, then those with
// the most free CPU.
func members(nodes []Node, is func(Rank) bool, size int) []Node {
	var out, unused []Node
	for _, n := range nodes {
		switch {
		case n.unused():
			unused = append(unused, n)
		case n.OneClaim && is(n.Decided):
			out = append(out, n)
		}
	}
	slices.SortFunc(unused, func(a, b Node) int {
		return cmp.Or(number(is(b.Decided))-number(is(a.Decided)), -cmp.Compare(a.FreeCPU, b.FreeCPU), cmp.Compare(a.Name, b.Name))
	})
	return append(out, unused[:min(size, len(unused))]...)
}

func countUnused(nodes []Node, is func(Rank) bool) int {
	n := 0
	for _, node := range nodes {
		n += number(node.unused() && is(node.Decided))
	}
	return n
}

func (n Node) unused() bool { return n.Free == n.GPUs }

func isHard(r Rank) bool { return r.Hard }

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}
