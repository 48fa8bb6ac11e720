// Package offer decides which devices a node's GPUs are offered as, with their
// attributes, capacities and counters.
//
// It is pure: the same node, plans and allocations give the same devices on
// every cluster. pkg/policy decides which policy applies to a GPU; pkg/control
// decides how devices are distributed over ResourceSlices and when they are
// published. Attribute names and the form of their values are those of NVIDIA's
// DRA driver, so that a selector written for it selects the same devices here.
//
// MIG partitions are offered before they exist: each profile at each possible
// placement is a device, and shared counters prevent that two claims get the
// same silicon. The numbers are computed from the GPU's tables.
//
// So are MPS shares, and replicas that take turns. Equal shares of a GPU are a
// device each, and a counter keeps them apart from the whole GPU. Shares of a
// partition, and shares whose size claims choose, are one device that is
// allocated several times.
//
// It is one package because all devices of a GPU are computed from one draft, and
// each kind of device limits the others.
//
// Only the controller, of which pkg/control/decision calls Build, and benchmarks import it.
package offer

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Server has the abilities of a cluster's API server and scheduler.
type Server struct {
	// Counters: the server stores shared counters. Without them only devices that
	// never overlap are offered: whole GPUs, existing MIG devices of others, the
	// partitions of a layout, or shares or replicas without the whole GPU.
	Counters bool
	// Multiple: the server stores devices that can be allocated several times
	// (consumable capacity), and the scheduler counts them (pkg/allocator). Without it all shares are equal, and only the
	// partitions of a layout can be shared.
	Multiple bool
	// Charged: the scheduler charges counters for devices that can be allocated
	// several times (pkg/allocator). Without it no such device consumes counters.
	Charged bool
	// Distrust is why Counters is false although the server stores them: sentences about the
	// scheduler, for Problems.
	Distrust string
	// MaxTainted is how many devices a GPU with taints may have: a slice has less room with
	// them. 0: the server stores no taints of devices, or the scheduler ignores them.
	// Devices that new claims must not get and that can't have taints aren't offered.
	MaxTainted int
	// InformationalTaints: taints may have the effect None, and the scheduler allocates
	// devices with them (pkg/allocator). Otherwise such taints are left out.
	InformationalTaints bool
	// Version of Kubernetes, for Problems; empty where it is unknown.
	Version string
	// CountersDoubt and MultipleDoubt are why Counters and Multiple are false although
	// the server may be able to: sentences for Problems. They are empty where it is
	// known that it isn't.
	CountersDoubt, MultipleDoubt string
}

// GPU is the offer of one physical GPU. Its devices stay together, because they
// are published and withdrawn together.
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
	// Problems or the GPU's conditions then say why.
	Devices []resourceapi.Device
	// Counters is the one counter set that Devices consume from; nil where no
	// two of them are in each other's way. Its name is the GPU's position by index, such
	// as "0": short, because every device repeats it. It isn't the index, because a lost
	// GPU may have the same index as another.
	Counters *resourceapi.CounterSet
	// Leftover lists the Devices that are offered only because a claim has them:
	// the plan has others. They are removed when their claims are gone. Their
	// attribute type is "leftover", so that no DeviceClass selects them for a new
	// claim; allocated devices aren't selected again.
	Leftover []gpu.DeviceName
	// Withheld lists the conditions that keep new claims off some of the GPU's devices, with
	// their messages; empty if none does.
	Withheld string
	// Missing lists profiles of the plan that this GPU doesn't have, in the plan's
	// order. That is no problem if a policy is for several models; a profile that
	// all GPUs of a policy miss is misspelt. Missing profiles of a layout are in
	// Problems.
	Missing []string
	// Problems lists the parts of the plan that can't be carried out, with reason
	// and remedy: complete sentences without the GPU's name, in a fixed order.
	Problems []string
	// WithoutWhole is the reason why the GPU isn't offered whole beside its shares or
	// replicas, all of which are offered: a sentence as those of Problems. Empty where
	// it is, or isn't shared.
	WithoutWhole string
	// Unsafe says that less than the plan is offered because the scheduler would
	// allocate parts of the GPU twice; Problems explains it.
	Unsafe bool
}

// Build returns the node's offer, by index. Each GPU is offered by its plan; one
// without a plan is offered as a whole only. A GPU with conditions has taints on the
// devices that they concern. Where it can't have any, a GPU with a condition that blocks
// all its devices isn't in the offer, and of another one the blocked devices that no claim
// has aren't. Nor is a GPU whose UUID doesn't identify it.
//
// allocated are the names of the node's devices that claims have been allocated,
// except for admin access, in any order, each once for each claim that has it. Each
// of them stays in the offer, whatever the plan. Nothing new of a GPU is offered while
// a claim has one of its partitions that its tables don't list, or a share or replica
// that the plan doesn't offer, or, where the plan is for shares or replicas of the whole
// GPU, anything else. Names of GPUs that the node doesn't have now are ignored.
//
// A GPU that others put into MIG mode is offered in partitions only, because CUDA
// can't use it whole. One whose mode is off is offered whole, and in partitions
// where this driver may switch the mode. While a change of the mode is pending only
// existing MIG devices are offered. Every plan offers the instances that others
// made, as they are or divided into MPS shares, and nothing in the space they take.
//
// Of a node that reports more than maxGPUs, which no server accepts, only the first
// ones are offered.
func Build(n gpu.Node, plans map[gpu.UUID]v1alpha1.Plan, allocated []gpu.DeviceName, server Server) []GPU {
	n.GPUs = byIndex(n.GPUs)
	names := gpu.NameAll(n.GPUs)
	claimed := byGPU(names, allocated)
	var out []GPU
	var arranged *arrangement
	for i, g := range n.GPUs {
		name, why := usable(names, g)
		if why != "" && (name == "" || g.Model.ProductName == "") {
			continue // it can't be described
		}
		o := newDraft(g, plans[g.UUID], server, validateMIG(names, g))
		o.keepAllocated(names, slices.Compact(slices.Clone(claimed[g.UUID])))
		arranged = o.arrange(arranged)
		described := o.describeAll(n, name, strconv.Itoa(i), names, arranged)
		described.Withheld = reasons(g.Conditions, func(c gpu.Condition) bool {
			return slices.ContainsFunc(described.Devices, func(d resourceapi.Device) bool { return c.BlocksDevice(gpu.DeviceName(d.Name), names) })
		})
		e := effects{names: names, claimed: claimed[g.UUID], tried: triedAgain(described.Devices, g.Conditions, names)}
		taint(described, g.Conditions, e, server.InformationalTaints)
		if len(described.Devices) > server.MaxTainted {
			if why != "" {
				continue
			}
			described.Devices = withoutTaints(described.Devices, claimed[g.UUID])
		}
		out = append(out, described)
	}
	slices.SortFunc(out, func(a, b GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// byIndex returns the first maxGPUs of the GPUs, by index and UUID.
func byIndex(gpus []gpu.GPU) []gpu.GPU {
	return slices.SortedFunc(slices.Values(gpus[:min(len(gpus), maxGPUs)]), func(a, b gpu.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
}

// WithheldGPU is a GPU that new claims don't get, or not all its devices, whatever its
// plan: they aren't in the offer, or are tainted.
type WithheldGPU struct {
	UUID gpu.UUID
	// Name of the whole GPU's device; empty where the UUID doesn't identify the GPU.
	Name gpu.DeviceName
	// Reason lists the conditions that block the GPU or devices of it, with their messages.
	Reason string
}

// Withheld returns the node's GPUs that Build, whose result is offered, leaves out, or of
// which new claims don't get all devices, by index.
func Withheld(n gpu.Node, offered []GPU) []WithheldGPU {
	n.GPUs = byIndex(n.GPUs)
	names := gpu.NameAll(n.GPUs)
	var out []WithheldGPU
	for _, g := range n.GPUs {
		name, why := usable(names, g)
		if i := slices.IndexFunc(offered, func(o GPU) bool { return o.UUID == g.UUID }); why == "" && i >= 0 {
			why = offered[i].Withheld
		}
		if why != "" {
			out = append(out, WithheldGPU{UUID: g.UUID, Name: name, Reason: why})
		}
	}
	return out
}

// usable returns the GPU's name, and the reason why it must not be used; "" if
// claims may use it.
func usable(names *gpu.Names, g gpu.GPU) (gpu.DeviceName, string) {
	name, ok := names.Name(gpu.Whole{GPU: g.UUID})
	why := reasons(g.Conditions, gpu.Condition.BlocksAllDevices)
	switch {
	case ok || why != "":
		return name, why
	case !g.UUID.IsWhole():
		return "", "its UUID doesn't begin with GPU-, as that of an integrated GPU, and no device can be named after it"
	default:
		return "", "its UUID doesn't identify it: it is malformed, or another GPU of the node has the same"
	}
}

// reasons lists the conditions that matter, with their messages.
func reasons(conditions []gpu.Condition, matters func(gpu.Condition) bool) string {
	var why []string
	for _, c := range conditions {
		switch {
		case !matters(c):
		case c.Message == "":
			why = append(why, string(c.Type))
		default:
			why = append(why, fmt.Sprintf("%s: %s", c.Type, c.Message))
		}
	}
	return strings.Join(why, "; ")
}

// Whole describes an entire GPU of the node, whether it is offered whole or
// not. A SharingPolicy's gpuSelector is evaluated on it. It has no name.
func Whole(n gpu.Node, g gpu.GPU) resourceapi.Device { return describeWhole(n, g, "") }

// byGPU sorts names of devices by the GPUs they are of.
func byGPU(names *gpu.Names, allocated []gpu.DeviceName) map[gpu.UUID][]gpu.DeviceName {
	out := make(map[gpu.UUID][]gpu.DeviceName)
	for _, name := range slices.Sorted(slices.Values(allocated)) {
		if uuid, ok := names.Parent(name); ok {
			out[uuid] = append(out[uuid], name)
		}
	}
	return out
}
