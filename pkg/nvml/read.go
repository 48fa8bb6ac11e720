package nvml

import (
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// readGPU reads all facts of a GPU, beginning with those last known. A fact that the GPU
// or its driver doesn't have is unknown; one that can't be read stays as it was. The error
// is about a fact without which the GPU can't be used: no further ones are read then, and
// the GPU is returned with those that were. Facts that only selectors need are
// attributes: their errors are a condition.
func (s *Session) readGPU(handle gonvml.Device, g gpu.GPU, object string) (gpu.GPU, error) {
	g.Conditions = nil
	for _, read := range []func() error{
		func() error { return store(&g.Minor)(readMinor(handle, object)) },
		func() error { return store(&g.PCI)(readPCI(handle, object)) },
		func() error { return store(&g.Model.ProductName)(readName(handle, object)) },
		func() error { return store(&g.Model.CUDAComputeCapability)(readCapability(handle, object)) },
		func() error { return store(&g.MemoryBytes)(readMemory(handle, object)) },
		func() error { return store(&g.MemoryReservedBytes)(s.readReserved(handle, object)) },
		func() error { return store(&g.MIG)(s.readMIG(handle, g.UUID, object)) },
	} {
		if err := read(); err != nil {
			return g, err
		}
	}
	var unread []error
	for _, read := range []func() error{
		func() error { return store(&g.Model.Brand)(readBrand(s.devices, handle, object)) },
		func() error { return store(&g.Model.Architecture)(readArchitecture(s.devices, handle, object)) },
		func() error { return store(&g.ECCEnabled)(readECC(handle, object)) },
		func() error { return store(&g.VirtualizationMode)(readVirtualization(handle, object)) },
		func() error { return store(&g.AddressingMode)(s.readAddressingMode(handle, object)) },
		func() error { return s.readFabric(handle, &g, object) },
		func() error { return s.readNVLink(handle, g.UUID, object) },
	} {
		switch err := read(); {
		case errors.Is(err, ErrLost):
			return g, err
		case err != nil:
			unread = append(unread, err)
		}
	}
	if len(unread) > 0 {
		g.Conditions = append(g.Conditions, attributesUnreadable(unread))
	}
	return g, nil
}

// store returns a function that stores the answer of a call, and returns its error. An
// answer with ErrNotSupported is the value of an unknown fact.
func store[T any](to *T) func(T, error) error {
	return func(v T, err error) error {
		err = failure(err)
		if err == nil {
			*to = v
		}
		return err
	}
}

// attributesUnreadable names the first call that failed, so that the message is short.
func attributesUnreadable(unread []error) gpu.Condition {
	c := gpu.Condition{Type: gpu.AttributesUnreadable, Message: unread[0].Error()}
	if more := len(unread) - 1; more > 0 {
		c.Message += fmt.Sprintf(" (and %d more)", more)
	}
	return c
}

// readMemory returns 0 for a GPU without memory of its own, such as the GB10.
func readMemory(handle gonvml.Device, object string) (int64, error) {
	memory, ret := handle.GetMemoryInfo()
	if err := wrap(ret, "nvmlDeviceGetMemoryInfo", object); err != nil {
		return 0, err
	}
	return int64(memory.Total), nil
}

// readReserved returns the memory that the driver reserves; 0 for a driver that
// is too old to report it (R510 and before).
func (s *Session) readReserved(handle gonvml.Device, object string) (int64, error) {
	if !s.has[callMemoryInfo] {
		return 0, nil
	}
	memory, ret := handle.GetMemoryInfo_v2()
	if err := wrap(ret, callMemoryInfo, object); err != nil {
		return 0, err
	}
	return int64(memory.Reserved), nil
}

// readMinor returns a negative number for a GPU without a device node (WSL).
func readMinor(handle gonvml.Device, object string) (int, error) {
	minor, ret := handle.GetMinorNumber()
	if err := wrap(ret, "nvmlDeviceGetMinorNumber", object); err != nil {
		return gpu.NoMinor, err
	}
	return minor, nil
}

func readPCI(handle gonvml.Device, object string) (gpu.PCIAddress, error) {
	pci, ret := handle.GetPciInfo()
	if err := wrap(ret, "nvmlDeviceGetPciInfo", object); err != nil {
		return "", err
	}
	return gpu.NewPCIAddress(cString(pci.BusId[:])), nil
}

func readName(handle gonvml.Device, object string) (string, error) {
	name, ret := handle.GetName()
	return name, wrap(ret, "nvmlDeviceGetName", object)
}

func readCapability(handle gonvml.Device, object string) (string, error) {
	major, minor, ret := handle.GetCudaComputeCapability()
	if err := wrap(ret, "nvmlDeviceGetCudaComputeCapability", object); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d.%d", major, minor), nil
}

// readBrand and readArchitecture use go-nvlib's names, so that selectors written for
// NVIDIA's driver match. A brand or architecture that is newer than go-nvlib has none.
func readBrand(lib device.Interface, handle gonvml.Device, object string) (string, error) {
	_, ret := handle.GetBrand()
	return nameOf(lib, handle, device.Device.GetBrandAsString, wrap(ret, "nvmlDeviceGetBrand", object))
}

func readArchitecture(lib device.Interface, handle gonvml.Device, object string) (string, error) {
	_, ret := handle.GetArchitecture()
	return nameOf(lib, handle, device.Device.GetArchitectureAsString, wrap(ret, "nvmlDeviceGetArchitecture", object))
}

// nameOf returns go-nvlib's name of a value, unless NVML failed to answer.
func nameOf(lib device.Interface, handle gonvml.Device, get func(device.Device) (string, error), failed error) (string, error) {
	if failed != nil {
		return "", failed
	}
	d, err := lib.NewDevice(handle)
	if err != nil {
		return "", err
	}
	name, _ := get(d) // its only error now is that it has no name
	return name, nil
}

func readECC(handle gonvml.Device, object string) (*bool, error) {
	current, _, ret := handle.GetEccMode()
	if err := wrap(ret, "nvmlDeviceGetEccMode", object); err != nil {
		return nil, err
	}
	enabled := current == gonvml.FEATURE_ENABLED
	return &enabled, nil
}

// readAddressingMode returns "HMM", "ATS" or "None", the names in NVIDIA's DRA
// driver, and "" if the driver (R550 and before) or the GPU doesn't report it.
func (s *Session) readAddressingMode(handle gonvml.Device, object string) (string, error) {
	if !s.has[callAddressingMode] {
		return "", nil
	}
	mode, ret := handle.GetAddressingMode()
	if err := wrap(ret, callAddressingMode, object); err != nil {
		return "", err
	}
	switch gonvml.DeviceAddressingModeType(mode.Value) {
	case gonvml.DEVICE_ADDRESSING_MODE_HMM:
		return "HMM", nil
	case gonvml.DEVICE_ADDRESSING_MODE_ATS:
		return "ATS", nil
	case gonvml.DEVICE_ADDRESSING_MODE_NONE:
		return "None", nil
	default:
		return "", nil // newer than this driver
	}
}

// readFabric reads a GPU's place in a fabric. Only GPUs behind NVSwitches have a state. Until
// Fabric Manager has registered such a GPU, CUDA programs fail on it (error 802); in MIG mode
// the GPU is used without its NVLinks.
func (s *Session) readFabric(handle gonvml.Device, g *gpu.GPU, object string) error {
	if !s.has[callFabric] {
		return nil
	}
	info, ret := handle.GetGpuFabricInfo()
	if err := failure(wrap(ret, callFabric, object)); err != nil {
		return err
	}
	g.Fabric = nil
	if info.State == gonvml.GPU_FABRIC_STATE_NOT_SUPPORTED { // so too after a call that isn't supported
		return nil
	}
	if why := fabricTrouble(info); why != "" {
		if g.MIG == nil || !g.MIG.Enabled {
			g.Conditions = append(g.Conditions, gpu.Condition{Type: gpu.FabricNotReady, Message: why})
		}
		return nil
	}
	if u := info.ClusterUuid; u != [16]uint8{} { // a fabric without a name connects no nodes
		g.Fabric = &gpu.Fabric{
			ClusterUUID: fmt.Sprintf("%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16]),
			CliqueID:    int(info.CliqueId),
		}
	}
	return nil
}

// fabricTrouble returns why a GPU hasn't joined its fabric; "" if it has.
func fabricTrouble(info gonvml.GpuFabricInfo) string {
	switch {
	case info.State == gonvml.GPU_FABRIC_STATE_NOT_STARTED:
		return "the GPU's registration with Fabric Manager has not started: is nvidia-fabricmanager running?"
	case info.State == gonvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return "the GPU's registration with Fabric Manager is in progress: is nvidia-fabricmanager running?"
	case info.State != gonvml.GPU_FABRIC_STATE_COMPLETED:
		return fmt.Sprintf("the GPU's registration with Fabric Manager is in state %d", info.State)
	case gonvml.Return(info.Status) != gonvml.SUCCESS:
		return fmt.Sprintf("the GPU's registration with Fabric Manager has failed: %v", gonvml.Return(info.Status))
	default:
		return ""
	}
}

// cString converts a NUL-terminated C string, with either type of char in
// go-nvml.
func cString[C int8 | uint8](s []C) string {
	var b strings.Builder
	for _, c := range s {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}
