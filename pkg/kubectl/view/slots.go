package view

import (
	"cmp"
	"math"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Slot is a range of a GPU's memory that a claim has, that is a MIG instance of others,
// or that is free.
type Slot struct {
	Node string `json:"node"`
	// GPU is its index, Model and UUID are its own.
	GPU   int    `json:"gpu"`
	UUID  string `json:"uuid,omitempty"`
	Model string `json:"model,omitempty"`
	// Placement is the range in memory slices as MIG counts them; of a share of a
	// partition, that of the partition. Absent where the GPU has none, and for shares of
	// the whole GPU and the memory beside them, which have no fixed place.
	Placement *Placement `json:"placement,omitempty"`
	// MemoryBytes is the size of the range, or of the use.
	MemoryBytes int64     `json:"memoryBytes,omitempty"`
	State       SlotState `json:"state"`
	// Use is who has it. A range that several claims have is a slot for each of them.
	Use *Use `json:"use,omitempty"`
	// Instance that others made.
	Instance *Instance `json:"instance,omitempty"`
}

// SlotState is one word for the use of a slot.
type SlotState string

// The states of a slot.
const (
	// SlotUsed: a claim has it.
	SlotUsed SlotState = "used"
	// SlotForeign: others than Tessera made a MIG instance there.
	SlotForeign SlotState = "foreign"
	// SlotFree: no claim has it. The GPU's Fits are the devices that fit.
	SlotFree SlotState = "free"
	// SlotBlocked: no claim has it, and none gets it: the GPU has a condition or a taint,
	// or isn't offered.
	SlotBlocked SlotState = "blocked"
	// SlotUnknown: no claim that can be seen has it, and not all claims can be seen.
	SlotUnknown SlotState = "unknown"
)

// Slots lists the slots of the node's GPUs, in the order of their places. Uses with
// admin access have no place, and are at the end of their GPU's.
func (n *PageNode) Slots() []Slot {
	var out []Slot
	for i := range n.GPUs {
		g := &n.GPUs[i]
		for _, s := range g.slots() {
			s.Node, s.GPU, s.UUID, s.Model = n.Name, g.Index, g.UUID, g.Model
			out = append(out, s)
		}
	}
	return out
}

// placed is a slot with its range as fractions of the memory.
type placed struct {
	Slot
	start, end float64
}

// slots lists those of a GPU.
func (g *PageGPU) slots() []Slot {
	used := g.taken()
	all := slices.Concat(used, g.between(used))
	slices.SortStableFunc(all, comparePlaces)
	var out []Slot
	for _, p := range all {
		out = append(out, p.Slot)
	}
	for i := range g.Uses {
		if u := &g.Uses[i]; u.AdminAccess {
			out = append(out, Slot{State: SlotUsed, Use: u, MemoryBytes: u.MemoryBytes})
		}
	}
	return out
}

func comparePlaces(a, b placed) int {
	return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.end, b.end))
}

// taken lists the ranges that claims or others have, in their order.
func (g *PageGPU) taken() []placed {
	var out []placed
	for _, s := range g.Segments {
		for _, i := range s.Uses {
			u := &g.Uses[i]
			slot := Slot{State: SlotUsed, Use: u, MemoryBytes: u.MemoryBytes, Placement: u.Placement}
			if u.Type == gpu.TypeGPU && g.MemorySlices > 0 {
				slot.Placement = &Placement{Size: g.MemorySlices}
			}
			out = append(out, placed{slot, s.Start, s.Start + s.Size})
		}
	}
	for i := range g.Instances {
		x, count := &g.Instances[i], float64(max(1, g.MemorySlices))
		start, size := float64(x.Placement.Start)/count, float64(x.Placement.Size)/count
		slot := Slot{State: SlotForeign, Instance: x, MemoryBytes: g.bytes(size), Placement: &x.Placement}
		out = append(out, placed{slot, start, start + size})
	}
	slices.SortStableFunc(out, comparePlaces)
	return out
}

// between lists the ranges that are left.
func (g *PageGPU) between(taken []placed) []placed {
	state := SlotFree
	switch g.State { //nolint:exhaustive // in the other states the rest is free
	case StateBlocked, StateWithheld:
		state = SlotBlocked
	case StateUnknown:
		state = SlotUnknown
	}
	loose := slices.ContainsFunc(taken, func(p placed) bool {
		return p.Use != nil && p.Use.Type != gpu.TypeGPU && p.Placement == nil
	})
	var out []placed
	end := 0.
	for _, p := range append(slices.Clone(taken), placed{start: 1, end: 1}) {
		if size := p.start - end; size > tiny {
			slot := Slot{State: state, MemoryBytes: g.bytes(size)}
			if !loose {
				slot.Placement = g.placement(end, size)
			}
			out = append(out, placed{slot, end, p.start})
		}
		end = max(end, p.end)
	}
	return out
}

func (g *PageGPU) bytes(fraction float64) int64 {
	return int64(math.Round(fraction * float64(g.MemoryBytes)))
}

// tiny is less than any part of a GPU: fractions are rounded.
const tiny = 1e-6

// placement is the range in memory slices; nil if it has no whole number of them.
func (g *PageGPU) placement(start, size float64) *Placement {
	from, n := start*float64(g.MemorySlices), size*float64(g.MemorySlices)
	whole := func(x float64) bool { return math.Abs(x-math.Round(x)) < tiny }
	if g.MemorySlices == 0 || !whole(from) || !whole(n) {
		return nil
	}
	return &Placement{Start: int(math.Round(from)), Size: int(math.Round(n))}
}
