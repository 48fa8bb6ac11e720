package offer

import (
	"fmt"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// typeLeftover is the attribute type of a device that only its claim keeps on offer.
const typeLeftover = "leftover"

// maxString is how long a string attribute may be on the API server.
const maxString = resourceapi.DeviceAttributeMaxValueLength

// describeWhole describes an entire GPU.
func describeWhole(n gpu.Node, g gpu.GPU, name gpu.DeviceName) resourceapi.Device {
	a := make(attributes)
	a.model(n, g)
	a.place(g)
	a.string("type", gpu.TypeGPU)
	a.string("uuid", string(g.UUID))
	a.string("memoryEnforcement", gpu.EnforcementHardware)
	a.string("computeEnforcement", gpu.EnforcementHardware)
	a.bool("migCapable", g.MIG != nil)
	if g.ECCEnabled != nil {
		a.bool("eccEnabled", *g.ECCEnabled)
	}
	a.string("virtualizationMode", g.VirtualizationMode)
	if f := g.Fabric; f != nil {
		a.string("fabricClusterUUID", f.ClusterUUID)
		a.string("fabricClique", clique(*f))
	}
	a.string("addressingMode", g.AddressingMode)
	a.nvlink(n, g)
	c := capacities{
		// Unlike an attribute, memory that isn't known is there, and 0: a selector on a capacity
		// that a device lacks fails, and with it the pod, on every node.
		gpu.MemoryCapacity: {Value: *resource.NewQuantity(g.MemoryBytes, resource.BinarySI)},
	}
	c.largest(g.MIG)
	return resourceapi.Device{Name: string(name), Attributes: a, Capacity: c}
}

// clique has the form of the node label nvidia.com/gpu.clique: a clique's number
// means something within its cluster only.
func clique(f gpu.Fabric) string { return fmt.Sprintf("%s.%d", f.ClusterUUID, f.CliqueID) }

// attributes has the attributes of one device. Unknown facts are omitted, so
// that a selector can test whether a fact is known.
type attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute

// model sets what all GPUs of one product, and all on one driver, share.
func (a attributes) model(n gpu.Node, g gpu.GPU) {
	a.string("productName", g.Model.ProductName)
	a.string("brand", g.Model.Brand)
	a.string("architecture", g.Model.Architecture)
	a.version("cudaComputeCapability", g.Model.CUDAComputeCapability)
	a.version("driverVersion", n.DriverVersion)
	a.version("cudaDriverVersion", n.CUDADriverVersion)
}

// place sets where in the machine the GPU is.
func (a attributes) place(g gpu.GPU) {
	a.int("index", g.Index)
	if g.Minor >= 0 {
		a.int("minor", g.Minor)
	}
	a.bus(g)
}

// bus sets where the GPU is on the PCI bus, with the names that all drivers use.
func (a attributes) bus(g gpu.GPU) {
	a.string(deviceattribute.StandardDeviceAttributePCIBusID, string(g.PCI))
	a.string(deviceattribute.StandardDeviceAttributePCIeRoot, g.PCIeRoot)
	if g.NUMANode != nil && *g.NUMANode >= 0 {
		a.int(deviceattribute.StandardDeviceAttributeNUMANode, *g.NUMANode)
	}
}

// nvlink sets what a claim's constraint needs to have its GPUs linked: a domain
// that several nodes share, the node's one behind NVSwitches, or one of some GPUs
// of the node.
func (a attributes) nvlink(n gpu.Node, g gpu.GPU) {
	if g.NVLink == nil {
		return
	}
	a.int("nvlinkLinks", g.NVLink.Links)
	switch {
	case g.Fabric != nil:
		a.string("nvlinkDomain", clique(*g.Fabric))
	case g.NVLink.Domain == gpu.SwitchDomain:
		a.string("nvlinkDomain", n.Name)
	default:
		a.string("nvlinkDomain", g.NVLink.Domain)
	}
}

// string sets a text, truncated to the server's limit.
func (a attributes) string(name resourceapi.QualifiedName, s string) {
	if s == "" {
		return
	}
	if len(s) > maxString {
		s = s[:maxString]
		for !utf8.ValidString(s) {
			s = s[:len(s)-1]
		}
	}
	a[name] = resourceapi.DeviceAttribute{StringValue: &s}
}

func (a attributes) int(name resourceapi.QualifiedName, n int) {
	v := int64(n)
	a[name] = resourceapi.DeviceAttribute{IntValue: &v}
}

func (a attributes) bool(name resourceapi.QualifiedName, b bool) {
	a[name] = resourceapi.DeviceAttribute{BoolValue: &b}
}

func (a attributes) version(name resourceapi.QualifiedName, s string) {
	if v, ok := gpu.SemanticVersion(s); ok {
		a[name] = resourceapi.DeviceAttribute{VersionValue: &v}
	}
}
