package offer

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// describePartition describes a MIG partition. Only one that others made has a
// UUID: that of a partition that is created on demand is known when a claim has it.
func describePartition(n gpu.Node, g gpu.GPU, p part, name gpu.DeviceName) resourceapi.Device {
	a := make(attributes)
	a.model(n, g)
	a.place(g)
	a.string("type", gpu.TypeMIG)
	a.string("uuid", string(p.uuid))
	a.string("parentUUID", string(g.UUID))
	a.string("profile", p.Profile)
	a.int("placementStart", p.Placement.Start)
	a.int("placementSize", p.Placement.Size)
	a.string("memoryEnforcement", enforcementHardware)
	a.string("computeEnforcement", enforcementHardware)
	a.string("addressingMode", g.AddressingMode)
	capacity := map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		"memory": {Value: *resource.NewQuantity(p.profile.MemoryBytes, resource.BinarySI)},
	}
	for _, u := range units(p.profile.Engines) {
		if u.count > 0 {
			capacity[u.capacity] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(int64(u.count), resource.DecimalSI)}
		}
	}
	return resourceapi.Device{Name: string(name), Attributes: a, Capacity: capacity}
}

// unit is one kind of engine: how many there are, and the names of the capacity
// and the counter that say so.
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
