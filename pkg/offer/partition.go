package offer

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// partitionAttributes is how many a partition on a host has, usually.
const partitionAttributes = 10

// describePartition describes a MIG partition. Only one that others made has a
// UUID: that of a partition that is created on demand is known when a claim has it.
//
// A GPU has many of them, and all schedulers and API servers keep each: of the GPU's
// attributes they have only those by which manifests select partitions (ADR 55).
func describePartition(g gpu.GPU, p part, name gpu.DeviceName) resourceapi.Device {
	a := make(attributes, partitionAttributes)
	a.product(g)
	a.int("index", g.Index)
	a.string(deviceattribute.StandardDeviceAttributePCIeRoot, g.PCIeRoot)
	a.string("type", gpu.TypeMIG)
	a.string("uuid", string(p.uuid))
	a.string("parentUUID", string(g.UUID))
	a.string("profile", p.Profile)
	a.string("placement", fmt.Sprintf("%d:%d", p.Placement.Start, p.Placement.Size)) // as nvidia-smi mig -lgi
	capacity := map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		gpu.MemoryCapacity: {Value: *resource.NewQuantity(p.profile.MemoryBytes, resource.BinarySI)},
	}
	if n := p.profile.Engines.Multiprocessors; n > 0 {
		capacity["multiprocessors"] = resourceapi.DeviceCapacity{Value: *quantity(n)}
	}
	return resourceapi.Device{Name: string(name), Attributes: a, Capacity: capacity}
}

// unit is one kind of engine: how many there are, and the name of its counter.
type unit struct {
	counter string
	count   int
}

// units are the engines by kind, always the same kinds in the same order.
func units(e gpu.Engines) []unit {
	return []unit{
		{"ofa-engines", e.OFAEngines},
		{"decoders", e.Decoders},
		{"encoders", e.Encoders},
		{"jpeg-engines", e.JPEGEngines},
		{"copy-engines", e.CopyEngines},
		{"multiprocessors", e.Multiprocessors},
	}
}
