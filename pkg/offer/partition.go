package offer

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Numbers of attributes and capacities that most partitions on hosts have.
const (
	partitionAttributes = 15
	partitionCapacities = 7
)

// describePartition describes a MIG partition: with all that NVIDIA's driver publishes
// of one, because an expression of a claim that names something else fails, and the
// scheduler then tries no other node (ADR 73). A GPU has many partitions, and all
// schedulers and API servers keep each, so what NVIDIA's driver leaves out is left out
// here too, except for index and placement.
//
// Only a partition that others made has a UUID, because that of one that is created on
// demand is known when a claim has it. Only such partitions have their memory slices as
// capacities, as there.
func describePartition(n gpu.Node, g gpu.GPU, p part, name gpu.DeviceName) resourceapi.Device {
	a := make(attributes, partitionAttributes)
	a.model(n, g)
	a.bus(g)
	a.int("index", g.Index)
	a.string("addressingMode", g.AddressingMode)
	a.string("type", gpu.TypeMIG)
	a.string("uuid", string(p.uuid))
	a.string("parentUUID", string(g.UUID))
	a.string("profile", p.Profile)
	a.string("placement", fmt.Sprintf("%d:%d", p.Placement.Start, p.Placement.Size)) // as nvidia-smi mig -lgi
	c := make(capacities, partitionCapacities)
	c[gpu.MemoryCapacity] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(p.profile.MemoryBytes, resource.BinarySI)}
	c.engines(p.profile.Engines)
	if p.exists {
		c.memorySlices(p.Placement, resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice-len(a))
	}
	return resourceapi.Device{Name: string(name), Attributes: a, Capacity: c}
}

// capacities has the capacities of one device.
type capacities map[resourceapi.QualifiedName]resourceapi.DeviceCapacity

// engines sets the numbers of engines, also where there are none.
func (c capacities) engines(e gpu.Engines) {
	for _, u := range units(e) {
		c[u.capacity] = resourceapi.DeviceCapacity{Value: *quantity(u.count)}
	}
}

// memorySlices sets a capacity of 1 for each memory slice of a partition, as long as
// there are at most so many capacities.
func (c capacities) memorySlices(at gpu.Placement, most int) {
	for i := at.Start; i < at.Start+at.Size && len(c) < most; i++ {
		c[resourceapi.QualifiedName(fmt.Sprintf("memorySlice%d", i))] = resourceapi.DeviceCapacity{Value: *quantity(1)}
	}
}

// largest sets the numbers of engines of the GPU's largest partition, as NVIDIA's driver
// does for whole GPUs that it offers in partitions too. NVML doesn't say how many engines
// a GPU has.
func (c capacities) largest(m *gpu.MIG) {
	if m == nil {
		return
	}
	for _, p := range m.Profiles {
		for _, u := range units(p.Engines) {
			if have := c[u.capacity].Value; have.CmpInt64(int64(u.count)) <= 0 {
				c[u.capacity] = resourceapi.DeviceCapacity{Value: *quantity(u.count)}
			}
		}
	}
}

// unit is one kind of engine: how many there are, and the names of its capacity and of
// its counter.
type unit struct {
	capacity resourceapi.QualifiedName
	counter  string
	count    int
}

// units are the engines by kind, always the same kinds in the same order.
func units(e gpu.Engines) []unit {
	return []unit{
		{"ofaEngines", "ofa-engines", e.OFAEngines},
		{"decoders", "decoders", e.Decoders},
		{"encoders", "encoders", e.Encoders},
		{"jpegEngines", "jpeg-engines", e.JPEGEngines},
		{"copyEngines", "copy-engines", e.CopyEngines},
		{"multiprocessors", "multiprocessors", e.Multiprocessors},
	}
}
