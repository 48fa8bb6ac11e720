// Package inventory translates between gpu.Node, the words decisions are made
// in, and GPUInventory, the object in which a node's facts travel from its
// kubelet plugin to the controller.
//
// Both directions are pure and total, and a node survives the way there and
// back unchanged, apart from order: GPUs come back sorted by index, conditions
// by type. The parts of GPUInventoryStatus that are no facts about GPUs (the
// publishing conversation, boot id, plugin version, the node's conditions)
// belong to the callers and are left alone.
//
// The plugin and the controller import it.
package inventory

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// SetFacts sets in s all facts of n: driver versions, GPUs, and their summary. The
// same node always gives the same result, except that conditions that a GPU already
// has in s keep their time. Stamp sets the time of the others. Quantities compare
// with equality.Semantic of k8s.io/apimachinery/pkg/api, not with
// reflect.DeepEqual.
func SetFacts(s *v1alpha1.GPUInventoryStatus, n gpu.Node) {
	gpus := slices.SortedStableFunc(slices.Values(n.GPUs), func(a, b gpu.GPU) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	s.DriverVersion = n.DriverVersion
	s.CUDADriverVersion = n.CUDADriverVersion
	s.GPUCount = int32(len(gpus))
	s.Models = Models(gpus)
	before := s.GPUs
	s.GPUs = each(gpus, fromGPU)
	for i := range s.GPUs {
		keepTimes(s.GPUs[i].Conditions, before, s.GPUs[i].UUID)
	}
}

// keepTimes copies from an earlier report since when a GPU has its conditions.
func keepTimes(conditions []v1alpha1.GPUCondition, before []v1alpha1.GPU, uuid string) {
	i := slices.IndexFunc(before, func(g v1alpha1.GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return
	}
	for j := range conditions {
		for _, c := range before[i].Conditions {
			if c.Type == conditions[j].Type && c.Status != metav1.ConditionFalse {
				conditions[j].LastTransitionTime = c.LastTransitionTime
			}
		}
	}
}

// Stamp sets the time of the GPUs' conditions that are new.
func Stamp(s *v1alpha1.GPUInventoryStatus, now metav1.Time) {
	for i := range s.GPUs {
		for j := range s.GPUs[i].Conditions {
			if c := &s.GPUs[i].Conditions[j]; c.LastTransitionTime == nil {
				c.LastTransitionTime = &now
			}
		}
	}
}

// Node reads the facts back. Its name is the inventory's.
func Node(inv *v1alpha1.GPUInventory) gpu.Node {
	return gpu.Node{
		Name:              inv.Name,
		DriverVersion:     inv.Status.DriverVersion,
		CUDADriverVersion: inv.Status.CUDADriverVersion,
		GPUs:              each(inv.Status.GPUs, toGPU),
	}
}

// Models summarizes GPUs for people, models in the order they appear:
// "8×NVIDIA H100 80GB HBM3", "4×NVIDIA L4, 2×Tesla T4". No GPUs: "".
func Models(gpus []gpu.GPU) string {
	var order []string
	count := make(map[string]int)
	for _, g := range gpus {
		name := g.Model.ProductName
		if count[name] == 0 {
			order = append(order, name)
		}
		count[name]++
	}
	for i, name := range order {
		order[i] = fmt.Sprintf("%d×%s", count[name], name)
	}
	return strings.Join(order, ", ")
}

func fromGPU(g gpu.GPU) v1alpha1.GPU {
	return v1alpha1.GPU{
		UUID:                  string(g.UUID),
		Index:                 int32(g.Index),
		Minor:                 int32(g.Minor),
		PCIAddress:            string(g.PCI),
		PCIeRoot:              g.PCIeRoot,
		NUMANode:              pointTo(g.NUMANode, func(n int) int32 { return int32(n) }),
		ProductName:           g.Model.ProductName,
		Brand:                 g.Model.Brand,
		Architecture:          g.Model.Architecture,
		CUDAComputeCapability: g.Model.CUDAComputeCapability,
		Memory:                bytes(g.MemoryBytes),
		MemoryReserved:        fromReserved(g.MemoryReservedBytes),
		ECCEnabled:            pointTo(g.ECCEnabled, func(b bool) bool { return b }),
		VirtualizationMode:    g.VirtualizationMode,
		Fabric: pointTo(g.Fabric, func(f gpu.Fabric) v1alpha1.Fabric {
			return v1alpha1.Fabric{ClusterUUID: f.ClusterUUID, CliqueID: int32(f.CliqueID)}
		}),
		NVLink: pointTo(g.NVLink, func(l gpu.NVLink) v1alpha1.NVLink {
			return v1alpha1.NVLink{Links: int32(l.Links), Domain: l.Domain}
		}),
		AddressingMode: g.AddressingMode,
		MIG:            pointTo(g.MIG, fromMIG),
		Conditions:     fromConditions(g.Conditions),
	}
}

func toGPU(g v1alpha1.GPU) gpu.GPU {
	return gpu.GPU{
		UUID:     gpu.UUID(g.UUID),
		Index:    int(g.Index),
		Minor:    int(g.Minor),
		PCI:      gpu.PCIAddress(g.PCIAddress),
		PCIeRoot: g.PCIeRoot,
		NUMANode: pointTo(g.NUMANode, func(n int32) int { return int(n) }),
		Model: gpu.Model{
			ProductName:           g.ProductName,
			Brand:                 g.Brand,
			Architecture:          g.Architecture,
			CUDAComputeCapability: g.CUDAComputeCapability,
		},
		MemoryBytes:         g.Memory.Value(),
		MemoryReservedBytes: toReserved(g.MemoryReserved),
		ECCEnabled:          pointTo(g.ECCEnabled, func(b bool) bool { return b }),
		VirtualizationMode:  g.VirtualizationMode,
		Fabric: pointTo(g.Fabric, func(f v1alpha1.Fabric) gpu.Fabric {
			return gpu.Fabric{ClusterUUID: f.ClusterUUID, CliqueID: int(f.CliqueID)}
		}),
		NVLink: pointTo(g.NVLink, func(l v1alpha1.NVLink) gpu.NVLink {
			return gpu.NVLink{Links: int(l.Links), Domain: l.Domain}
		}),
		AddressingMode: g.AddressingMode,
		MIG:            pointTo(g.MIG, toMIG),
		Conditions:     toConditions(g.Conditions),
	}
}

// fromReserved leaves out what NVML didn't tell.
func fromReserved(n int64) *resource.Quantity {
	if n == 0 {
		return nil
	}
	q := bytes(n)
	return &q
}

func toReserved(q *resource.Quantity) int64 {
	if q == nil {
		return 0
	}
	return q.Value()
}

// fromConditions writes one entry a type, since the object's list is keyed by
// type: two device nodes that are missing become one condition with both
// messages. One bad GPU must not make the whole report unstorable. Only pkg/health reports
// refused devices, once.
func fromConditions(conditions []gpu.Condition) []v1alpha1.GPUCondition {
	messages := make(map[gpu.ConditionType][]string)
	refusals := make(map[gpu.ConditionType]gpu.Condition)
	for _, c := range conditions {
		if len(c.Refused) > 0 {
			refusals[c.Type] = c
		}
		if !slices.Contains(messages[c.Type], c.Message) {
			messages[c.Type] = append(messages[c.Type], c.Message)
		}
	}
	var out []v1alpha1.GPUCondition
	for t, m := range messages {
		slices.Sort(m)
		c := v1alpha1.GPUCondition{Type: string(t), Status: metav1.ConditionTrue, Message: strings.Join(m, "; ")}
		if r, ok := refusals[t]; ok {
			c.Refused = each(r.Refused, func(d gpu.DeviceName) string { return string(d) })
			c.RetryAt = new(metav1.NewTime(r.RetryAt.Truncate(time.Second))) // as the server stores it
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b v1alpha1.GPUCondition) int { return cmp.Compare(a.Type, b.Type) })
	return out
}

// toConditions leaves out what isn't so any more.
func toConditions(conditions []v1alpha1.GPUCondition) []gpu.Condition {
	var out []gpu.Condition
	for _, c := range conditions {
		if c.Status != metav1.ConditionFalse {
			out = append(out, gpu.Condition{
				Type: gpu.ConditionType(c.Type), Message: c.Message, Since: ptr.Deref(c.LastTransitionTime, metav1.Time{}).Time,
				Refused: each(c.Refused, func(d string) gpu.DeviceName { return gpu.DeviceName(d) }), RetryAt: ptr.Deref(c.RetryAt, metav1.Time{}).Time,
			})
		}
	}
	return out
}

func fromMIG(m gpu.MIG) v1alpha1.MIG {
	return v1alpha1.MIG{
		Enabled:    m.Enabled,
		Pending:    m.Pending,
		Switchable: m.Switchable,
		Profiles: each(m.Profiles, func(p gpu.Profile) v1alpha1.MIGProfile {
			return v1alpha1.MIGProfile{
				Name:            p.Name,
				ID:              int32(p.ID),
				MaxInstances:    int32(p.MaxInstances),
				Memory:          bytes(p.MemoryBytes),
				Multiprocessors: int32(p.Engines.Multiprocessors),
				CopyEngines:     int32(p.Engines.CopyEngines),
				Decoders:        int32(p.Engines.Decoders),
				Encoders:        int32(p.Engines.Encoders),
				JPEGEngines:     int32(p.Engines.JPEGEngines),
				OFAEngines:      int32(p.Engines.OFAEngines),
				Placements:      each(p.Placements, fromPlacement),
			}
		}),
		Instances: each(m.Instances, func(i gpu.Instance) v1alpha1.MIGInstance {
			return v1alpha1.MIGInstance{
				UUID:              string(i.UUID),
				Profile:           i.Profile,
				Placement:         fromPlacement(i.Placement),
				GPUInstanceID:     int32(i.GPUInstanceID),
				ComputeInstanceID: fromComputeInstance(i.ComputeInstanceID),
			}
		}),
	}
}

func toMIG(m v1alpha1.MIG) gpu.MIG {
	return gpu.MIG{
		Enabled:    m.Enabled,
		Pending:    m.Pending,
		Switchable: m.Switchable,
		Profiles: each(m.Profiles, func(p v1alpha1.MIGProfile) gpu.Profile {
			return gpu.Profile{
				Name:         p.Name,
				ID:           int(p.ID),
				MaxInstances: int(p.MaxInstances),
				MemoryBytes:  p.Memory.Value(),
				Engines: gpu.Engines{
					Multiprocessors: int(p.Multiprocessors),
					CopyEngines:     int(p.CopyEngines),
					Decoders:        int(p.Decoders),
					Encoders:        int(p.Encoders),
					JPEGEngines:     int(p.JPEGEngines),
					OFAEngines:      int(p.OFAEngines),
				},
				Placements: each(p.Placements, toPlacement),
			}
		}),
		Instances: each(m.Instances, func(i v1alpha1.MIGInstance) gpu.Instance {
			return gpu.Instance{
				UUID:              gpu.UUID(i.UUID),
				Profile:           i.Profile,
				Placement:         toPlacement(i.Placement),
				GPUInstanceID:     int(i.GPUInstanceID),
				ComputeInstanceID: int(ptr.Deref(i.ComputeInstanceID, gpu.NoComputeInstance)),
			}
		}),
	}
}

func fromComputeInstance(id int) *int32 {
	if id == gpu.NoComputeInstance {
		return nil
	}
	return new(int32(id))
}

func fromPlacement(p gpu.Placement) v1alpha1.MIGPlacement {
	return v1alpha1.MIGPlacement{Start: int32(p.Start), Size: int32(p.Size)}
}

func toPlacement(p v1alpha1.MIGPlacement) gpu.Placement {
	return gpu.Placement{Start: int(p.Start), Size: int(p.Size)}
}

func bytes(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.BinarySI) }

// each translates a list; an empty one becomes nil, as the server stores it.
func each[A, B any](in []A, f func(A) B) []B {
	if len(in) == 0 {
		return nil
	}
	out := make([]B, len(in))
	for i := range in {
		out[i] = f(in[i])
	}
	return out
}

// pointTo translates what may be absent.
func pointTo[A, B any](in *A, f func(A) B) *B {
	if in == nil {
		return nil
	}
	out := f(*in)
	return &out
}
