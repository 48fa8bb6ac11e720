// Package offer decides what is on the shelf: which devices, with which
// attributes, capacities and counters, a node's GPUs are offered as.
//
// It is pure: the same node, plans and allocations give the same devices on
// every cluster. Which policy a GPU is under is pkg/policy's affair; what a
// server can store, how devices are spread over ResourceSlices and when they
// are published is pkg/control's. Attribute names and the form of their values
// are those of NVIDIA's DRA driver, so that a selector written for it selects
// the same devices here.
//
// MIG partitions are offered before they exist: each profile at each place it
// can be made at is a device, and shared counters see to it that no two claims
// get silicon twice. What the numbers are is computed from the GPU's tables.
//
// So are MPS shares, and replicas that take turns. Equal shares of a GPU are a
// device each, and a counter keeps them apart from the whole GPU. Shares of a
// partition, and those that claims choose the size of, are one device that is
// given several times.
//
// Only the controller, and what measures it, import it.
package offer

import (
	"cmp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Driver is the name of this DRA driver; attributes with bare names are in its
// domain.
const Driver = "gpu.nvidia.com"

// Plan is what a GPU is to be offered as: one of these, at most. The zero Plan
// is exclusive: as a whole only.
type Plan struct {
	// Partitioned cuts the GPU; the zero PartitionedPlan into the default
	// profiles, wherever they fit, on demand. Nil: exclusive. KeepWarm changes
	// nothing here.
	Partitioned *v1alpha1.PartitionedPlan
	// MPS divides the GPU into MPS shares.
	MPS *v1alpha1.MPSPlan
	// TimeSliced offers replicas. Interval changes nothing here.
	TimeSliced *v1alpha1.TimeSlicedPlan
}

// Options are what a node's offer depends on besides its GPUs.
type Options struct {
	// Plan of each GPU. Nil: all are exclusive.
	Plan func(gpu.GPU) Plan
	// Allocated are the names of the node's devices that claims have been
	// given, admin access apart, in any order. None of them leaves the shelf,
	// whatever the plan. While a claim has a partition that its GPU's tables don't
	// list, or a share or replica that the plan doesn't offer, or anything else
	// where the plan offers whole GPUs' shares or replicas, nothing new of the GPU
	// is offered. A name that is of no GPU on this node now is ignored, and one
	// that is there several times counts once.
	Allocated []gpu.DeviceName
	// Counters says that the server stores shared counters. Without them only
	// devices that never overlap are offered: whole GPUs, others' instances,
	// what a layout fixes, or shares or replicas without the whole.
	Counters bool
	// Multiple says that the server stores devices that can be given several
	// times (consumable capacity). Without it all shares are equal, and there
	// are shares of partitions only where a layout fixes these.
	Multiple bool
	// Charged says that the scheduler charges counters for devices that can be
	// given several times (pkg/allocator). Without it no such device consumes
	// counters.
	Charged bool
	// Version of Kubernetes, for Problems; empty where it isn't known.
	Version string
}

// GPU is what one physical GPU is offered as. Its devices stay together,
// because they come and go together.
type GPU struct {
	UUID gpu.UUID
	// Name of the whole GPU's device; unique and stable on the node, also where
	// the GPU isn't offered whole.
	Name gpu.DeviceName
	// Index is NVML's: GPUs are offered in this order.
	Index int
	// Devices in the order in which they should be given away: the scheduler
	// takes the first that fits. Never more than one ResourceSlice can hold: 64
	// with Counters, 128 without. Empty where nothing of the GPU can be offered;
	// Problems then says why.
	Devices []resourceapi.Device
	// Counters is the one counter set that Devices consume from; nil where no
	// two of them are in each other's way. Its name is Name.
	Counters *resourceapi.CounterSet
	// Leftover are those of Devices that are there only because a claim has
	// them: the plan wants others. When their claims are gone, so are they. Their
	// attribute type is "leftover", so that no DeviceClass selects them for a new
	// claim; what a claim has been given isn't selected again.
	Leftover []gpu.DeviceName
	// Missing are profiles of the plan that this GPU hasn't, in the plan's order.
	// That is no problem where a policy is for several models; a profile that all
	// GPUs of a policy miss is misspelt. What a layout misses is among Problems.
	Missing []string
	// Problems say what of the plan can't be carried out, why, and what to do:
	// whole sentences without the GPU's name, in a fixed order.
	Problems []string
	// Uncharged says that less than the plan is offered because the scheduler
	// doesn't charge counters for shares; Problems explains it.
	Uncharged bool
}

// Build returns what the node offers, by index. A GPU that must not be given
// to anybody isn't in it: one with a blocking condition, one whose UUID
// doesn't identify it.
//
// A GPU that others put into MIG mode is offered in partitions only; CUDA
// can't use it whole. One whose mode is off is offered whole, and in
// partitions where this driver may switch the mode. While a change of mode is
// pending only what exists is offered. Instances that others made are offered
// in every plan, as they are or divided into MPS shares, and nothing in the space
// they take.
//
// Of a node that reports more than maxGPUs, as no server lets it, the rest is
// left out.
func Build(n gpu.Node, o Options) []GPU {
	n.GPUs = n.GPUs[:min(len(n.GPUs), maxGPUs)]
	names := nameAll(n.GPUs)
	allocated := byGPU(names, o.Allocated)
	var out []GPU
	for _, g := range n.GPUs {
		name, ok := names.Name(gpu.Whole{GPU: g.UUID})
		if !ok || slices.ContainsFunc(g.Conditions, gpu.Condition.Blocks) {
			continue
		}
		var p Plan
		if o.Plan != nil {
			p = o.Plan(g)
		}
		s := newShelf(g, p, o, sane(names, g))
		s.keep(names, allocated[g.UUID])
		out = append(out, s.offer(n, name, names))
	}
	slices.SortFunc(out, func(a, b GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// Whole describes an entire GPU of the node, whether it is offered whole or
// not: it is what a SharingPolicy's gpuSelector is asked about. It has no
// name.
func Whole(n gpu.Node, g gpu.GPU) resourceapi.Device { return whole(n, g, "") }

// byGPU sorts names of devices, each once, by the GPUs they are of.
func byGPU(names *gpu.Names, allocated []gpu.DeviceName) map[gpu.UUID][]gpu.DeviceName {
	out := make(map[gpu.UUID][]gpu.DeviceName)
	for _, name := range slices.Compact(slices.Sorted(slices.Values(allocated))) {
		if uuid, ok := names.Parent(name); ok {
			out[uuid] = append(out[uuid], name)
		}
	}
	return out
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
