package claimstatus

import (
	"cmp"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Metadata returns what the containers of a prepared claim can read about one of its
// devices: the facts that the claim's status has, for all kinds of devices, and the
// GPU's own. Attributes that ResourceSlices have too have the same names and values
// there, except uuid: here it is always that by which CUDA and NVML find the device.
// What isn't known is left out. docs/user/operate.md lists the attributes for users.
func Metadata(node gpu.Node, realized *holding.Realized, h holding.Holding) *kubeletplugin.DeviceMetadata {
	a := attributes{}
	a.model(node, h.GPU)
	a.device(realized, h)
	a.limits(h)
	return &kubeletplugin.DeviceMetadata{Attributes: a}
}

// attributes are a device's, by name.
type attributes map[string]resourceapi.DeviceAttribute

// model sets what the GPU has of its own.
func (a attributes) model(node gpu.Node, uuid gpu.UUID) {
	a.version("driverVersion", node.DriverVersion)
	a.version("cudaDriverVersion", node.CUDADriverVersion)
	i := slices.IndexFunc(node.GPUs, func(g gpu.GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return
	}
	g := node.GPUs[i]
	a.string("productName", g.Model.ProductName)
	a.string("brand", g.Model.Brand)
	a.string("architecture", g.Model.Architecture)
	a.version("cudaComputeCapability", g.Model.CUDAComputeCapability)
	a.string(string(deviceattribute.StandardDeviceAttributePCIBusID), string(g.PCI))
	a.string(string(deviceattribute.StandardDeviceAttributePCIeRoot), g.PCIeRoot)
	if g.NUMANode != nil && *g.NUMANode >= 0 {
		a.int(string(deviceattribute.StandardDeviceAttributeNUMANode), int64(*g.NUMANode))
	}
}

// device sets which part of the GPU the device is.
func (a attributes) device(realized *holding.Realized, h holding.Holding) {
	facts, _ := dataFor(realized, h)
	a.string("uuid", string(cmp.Or(facts.UUID, facts.ParentUUID)))
	if i := facts.Instance; i != nil {
		a.string("profile", i.Profile)
		a.string("placement", fmt.Sprintf("%d:%d", i.Placement.Start, i.Placement.Size))
		a.int("gpuInstanceID", int64(i.GPUInstanceID))
		a.int("computeInstanceID", int64(i.ComputeInstanceID))
	}
	kind := gpu.TypeGPU
	switch d := h.Of().(type) {
	case gpu.Whole:
	case gpu.Partition:
		kind = gpu.TypeMIG
	case gpu.Share:
		kind = gpu.TypeMPS
		a.part("share", "shares", d.Number, d.Count)
	case gpu.Replica:
		kind = gpu.TypeTimeSlice
		a.part("replica", "replicas", d.Number, d.Count)
	}
	a.string("type", kind)
	if kind != gpu.TypeGPU {
		a.string("parentUUID", string(facts.ParentUUID))
	}
	a.string("shareID", h.ShareID)
	if h.Admin {
		a["adminAccess"] = resourceapi.DeviceAttribute{BoolValue: &h.Admin}
	}
}

// part sets which of several equal parts the device is; nothing where claims choose their
// sizes.
func (a attributes) part(number, count string, n, of int) {
	if of > 0 {
		a.int(number, int64(n))
		a.int(count, int64(of))
	}
}

// limits sets what the claim's processes may use of the device, and what enforces it.
func (a attributes) limits(h holding.Holding) {
	memory, compute := gpu.EnforcementHardware, gpu.EnforcementHardware
	switch {
	case h.MPS != nil:
		memory, compute = gpu.EnforcementPerProcess, gpu.EnforcementCeiling
		if mib := h.MPS.MemoryMiB; mib > 0 {
			a.int("memoryLimitMiB", mib)
		}
		if threads := h.MPS.ThreadPercentage; threads > 0 {
			a.int("threadPercentage", int64(threads))
		}
	case h.Replica != nil:
		memory, compute = gpu.EnforcementNone, gpu.EnforcementNone
	}
	a.string("memoryEnforcement", memory)
	a.string("computeEnforcement", compute)
}

func (a attributes) string(name, s string) {
	if s != "" {
		a[name] = resourceapi.DeviceAttribute{StringValue: &s}
	}
}

func (a attributes) int(name string, n int64) {
	a[name] = resourceapi.DeviceAttribute{IntValue: &n}
}

func (a attributes) version(name, s string) {
	if v, ok := gpu.SemanticVersion(s); ok {
		a[name] = resourceapi.DeviceAttribute{VersionValue: &v}
	}
}
