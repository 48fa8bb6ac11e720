// Package offer decides what is on the shelf: which devices, with which
// attributes and capacities, a node's GPUs are offered as.
//
// It is pure: the same node gives the same devices on every cluster. What a
// server can store of them, how they are spread over ResourceSlices and when
// they are published is pkg/control's affair. Attribute names and the form of
// their values are those of NVIDIA's DRA driver, so that a selector written
// for it selects the same GPUs here.
//
// Only the controller imports it.
package offer

import (
	"cmp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Driver is the name of this DRA driver; attributes with bare names are in its
// domain.
const Driver = "gpu.nvidia.com"

// GPU is what one physical GPU is offered as. Its devices stay together,
// because they come and go together.
type GPU struct {
	// Name of the whole GPU's device; unique and stable on the node.
	Name gpu.DeviceName
	// Index is NVML's: GPUs are offered in this order.
	Index int
	// Devices in the order in which they should be given away. Never empty.
	Devices []resourceapi.Device
}

// Build returns what the node offers, by index. A GPU that must not be given
// to anybody isn't offered: one with a blocking condition, one in MIG mode
// (CUDA can't use it whole), one whose UUID doesn't identify it.
func Build(n gpu.Node) []GPU {
	names := nameAll(n.GPUs)
	var out []GPU
	for _, g := range n.GPUs {
		name, ok := names.Name(gpu.Whole{GPU: g.UUID})
		if !ok || !offered(g) {
			continue
		}
		out = append(out, GPU{Name: name, Index: g.Index, Devices: []resourceapi.Device{whole(n, g, name)}})
	}
	slices.SortFunc(out, func(a, b GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Name, b.Name))
	})
	return out
}

func offered(g gpu.GPU) bool {
	return !slices.ContainsFunc(g.Conditions, gpu.Condition.Blocks) && (g.MIG == nil || !g.MIG.Enabled)
}

// nameAll names what can be named: a GPU that reports nonsense, or the UUID of
// another one, must not take the others off the shelf.
func nameAll(gpus []gpu.GPU) *gpu.Names {
	key := func(u gpu.UUID) string { return strings.ToLower(strings.ReplaceAll(string(u), "-", "")) }
	count := make(map[string]int, len(gpus))
	for _, g := range gpus {
		count[key(g.UUID)]++
	}
	var good []gpu.GPU
	for _, g := range gpus {
		if _, err := gpu.NewNames([]gpu.GPU{g}); err == nil && count[key(g.UUID)] == 1 {
			good = append(good, g)
		}
	}
	names, err := gpu.NewNames(good)
	if err != nil {
		names = &gpu.Names{} // names nothing; each was good and none is there twice
	}
	return names
}
