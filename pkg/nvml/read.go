package nvml

import (
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// readGPU reads all facts of the GPU at an index.
func (s *Session) readGPU(handle gonvml.Device, index int, object string) (gpu.GPU, error) {
	g := gpu.GPU{Index: index}
	if err := readIdentity(handle, object, &g); err != nil {
		return gpu.GPU{}, err
	}
	var err error
	if g.Model, err = readModel(s.devices, handle, object); err != nil {
		return gpu.GPU{}, err
	}
	memory, ret := handle.GetMemoryInfo()
	if err := wrap(ret, "nvmlDeviceGetMemoryInfo", object); err != nil {
		return gpu.GPU{}, err
	}
	g.MemoryBytes = int64(memory.Total)
	if g.MemoryReservedBytes, err = s.readReserved(handle, object); err != nil {
		return gpu.GPU{}, err
	}
	if g.ECCEnabled, err = readECC(handle, object); err != nil {
		return gpu.GPU{}, err
	}
	g.VirtualizationMode = readVirtualization(handle)
	g.Fabric = readFabric(handle)
	s.readNVLink(handle, g.UUID)
	if g.AddressingMode, err = s.readAddressingMode(handle, object); err != nil {
		return gpu.GPU{}, err
	}
	if g.MIG, err = s.readMIG(handle, g.UUID, object); err != nil {
		return gpu.GPU{}, err
	}
	return g, nil
}

// readReserved returns the memory that the driver reserves; 0 for a driver that
// is too old to report it (R510 and before).
func (s *Session) readReserved(handle gonvml.Device, object string) (int64, error) {
	if !s.has[callMemoryInfo] {
		return 0, nil
	}
	memory, ret := handle.GetMemoryInfo_v2()
	err := wrap(ret, callMemoryInfo, object)
	if errors.Is(err, ErrNotSupported) {
		return 0, nil
	}
	return int64(memory.Reserved), err
}

func readIdentity(handle gonvml.Device, object string, g *gpu.GPU) error {
	uuid, ret := handle.GetUUID()
	if err := wrap(ret, "nvmlDeviceGetUUID", object); err != nil {
		return err
	}
	minor, ret := handle.GetMinorNumber()
	if err := wrap(ret, "nvmlDeviceGetMinorNumber", object); err != nil {
		return err
	}
	pci, ret := handle.GetPciInfo()
	if err := wrap(ret, "nvmlDeviceGetPciInfo", object); err != nil {
		return err
	}
	g.UUID, g.Minor, g.PCI = gpu.UUID(uuid), minor, gpu.NewPCIAddress(cString(pci.BusId[:]))
	return nil
}

// readModel uses go-nvlib's names of brands and architectures, so that
// selectors written for NVIDIA's driver match.
func readModel(lib device.Interface, handle gonvml.Device, object string) (gpu.Model, error) {
	name, ret := handle.GetName()
	if err := wrap(ret, "nvmlDeviceGetName", object); err != nil {
		return gpu.Model{}, err
	}
	d, err := lib.NewDevice(handle)
	if err != nil {
		return gpu.Model{}, fmt.Errorf("read model %s: %w", object, err)
	}
	m := gpu.Model{ProductName: name}
	// Report the GPU even if its brand or architecture is newer than the library.
	m.Brand, _ = d.GetBrandAsString()
	m.Architecture, _ = d.GetArchitectureAsString()
	major, minor, ret := handle.GetCudaComputeCapability()
	if err := wrap(ret, "nvmlDeviceGetCudaComputeCapability", object); err != nil {
		return gpu.Model{}, err
	}
	m.CUDAComputeCapability = fmt.Sprintf("%d.%d", major, minor)
	return m, nil
}

func readECC(handle gonvml.Device, object string) (*bool, error) {
	current, _, ret := handle.GetEccMode()
	err := wrap(ret, "nvmlDeviceGetEccMode", object)
	if errors.Is(err, ErrNotSupported) {
		return nil, nil //nolint:nilnil // nil is the documented value for "no ECC"
	}
	if err != nil {
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
	err := wrap(ret, callAddressingMode, object)
	if errors.Is(err, ErrNotSupported) {
		return "", nil
	}
	if err != nil {
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

// readFabric returns nil unless the GPU has joined a fabric.
func readFabric(handle gonvml.Device) *gpu.Fabric {
	info, ret := handle.GetGpuFabricInfo()
	if ret != gonvml.SUCCESS || info.State != gonvml.GPU_FABRIC_STATE_COMPLETED || gonvml.Return(info.Status) != gonvml.SUCCESS {
		return nil
	}
	u := info.ClusterUuid
	if u == [16]uint8{} {
		return nil // a fabric without a name connects no GPUs
	}
	return &gpu.Fabric{
		ClusterUUID: fmt.Sprintf("%x-%x-%x-%x-%x", u[0:4], u[4:6], u[6:8], u[8:10], u[10:16]),
		CliqueID:    int(info.CliqueId),
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
