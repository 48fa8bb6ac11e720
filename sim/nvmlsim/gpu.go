package nvmlsim

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// GPU is a GPU as a session sees it. Its getters are the NVML calls of the same
// name; faults apply to each, and they return GPUIsLost when the GPU has fallen
// off the bus.
type GPU struct {
	m     *Machine
	pos   int
	index int
	id    Identity
	model *Model
}

func (g *GPU) call(name string) error { return g.m.call(name, g.pos) }

// value returns v unless a fault applies to the call.
func value[T any](g *GPU, call string, v T) (T, error) {
	if err := g.call(call); err != nil {
		var zero T
		return zero, err
	}
	return v, nil
}

// fromState answers from the current state; without access to the state file a
// GPU answers as after boot.
func fromState[T any](g *GPU, call string, get func(GPUState) T) (T, error) {
	return value(g, call, get(g.state()))
}

func (g *GPU) state() GPUState {
	if st := g.m.state(); st != nil && g.pos < len(st.GPUs) {
		return st.GPUs[g.pos]
	}
	return bootGPU(g.id, g.model)
}

// Position returns the GPU's position in the machine: the number that Lose,
// Fault and Event use.
func (g *GPU) Position() int { return g.pos }

// VisibleIndex returns the index without a call of NVML.
func (g *GPU) VisibleIndex() int { return g.index }

// Model returns the GPU's model.
func (g *GPU) Model() *Model { return g.model }

// Identity returns the GPU's identity.
func (g *GPU) Identity() Identity { return g.id }

// Index returns the index in NVML's order, among the GPUs visible here.
func (g *GPU) Index() (int, error) { return value(g, "DeviceGetIndex", g.index) }

// UUID returns "GPU-…"; without the prefix for an integrated GPU.
func (g *GPU) UUID() (string, error) { return value(g, "DeviceGetUUID", g.id.UUID) }

// Name returns the product name.
func (g *GPU) Name() (string, error) { return value(g, "DeviceGetName", g.model.ProductName) }

// Serial returns the serial number.
func (g *GPU) Serial() (string, error) { return value(g, "DeviceGetSerial", g.id.Serial) }

// MinorNumber is N of /dev/nvidiaN now.
func (g *GPU) MinorNumber() (int, error) {
	return fromState(g, "DeviceGetMinorNumber", func(s GPUState) int { return s.Minor })
}

// ModuleID returns the position on its board.
func (g *GPU) ModuleID() (int, error) { return value(g, "DeviceGetModuleId", g.id.ModuleID) }

// BoardID returns an id derived from the PCI address.
func (g *GPU) BoardID() (uint32, error) {
	p := g.id.PCI()
	return value(g, "DeviceGetBoardId", p.Bus<<8|p.Device)
}

// Brand is nvmlBrandType_t.
func (g *GPU) Brand() (uint32, error) { return value(g, "DeviceGetBrand", g.model.BrandType()) }

// Architecture is nvmlDeviceArchitecture_t.
func (g *GPU) Architecture() (uint32, error) {
	return value(g, "DeviceGetArchitecture", g.model.ArchitectureType())
}

// CUDAComputeCapability returns the major and the minor number.
func (g *GPU) CUDAComputeCapability() ([2]int, error) {
	major, minor, _ := strings.Cut(g.model.CUDAComputeCapability, ".")
	a, _ := strconv.Atoi(major)
	b, _ := strconv.Atoi(minor)
	return value(g, "DeviceGetCudaComputeCapability", [2]int{a, b})
}

// VBIOSVersion returns the version, NotSupported if the model has none.
func (g *GPU) VBIOSVersion() (string, error) {
	if g.model.VBIOSVersion == "" {
		return value(g, "DeviceGetVbiosVersion", "00.00.00.00.00")
	}
	return value(g, "DeviceGetVbiosVersion", g.model.VBIOSVersion)
}

// PCI is a GPU's PCI function.
type PCI struct {
	Domain, Bus, Device uint32
}

// BusID returns the address as NVML prints it, with eight digits of domain.
func (p PCI) BusID() string { return fmt.Sprintf("%08X:%02X:%02X.0", p.Domain, p.Bus, p.Device) }

// sysfs returns the address as sysfs spells it, with four digits of domain unless it
// needs more.
func (p PCI) sysfs() string { return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device) }

func (p PCI) compare(q PCI) int {
	return cmp.Or(cmp.Compare(p.Domain, q.Domain), cmp.Compare(p.Bus, q.Bus), cmp.Compare(p.Device, q.Device))
}

// BusIDLegacy returns the address with four digits of domain.
func (p PCI) BusIDLegacy() string { return fmt.Sprintf("%04X:%02X:%02X.0", p.Domain, p.Bus, p.Device) }

// PCIInfo returns the GPU's address. The Model has the device and subsystem
// ids.
func (g *GPU) PCIInfo() (PCI, error) {
	return value(g, callPCIInfo, g.id.PCI())
}

func parseBusID(s string) (PCI, bool) {
	s = strings.ToLower(s)
	if i := strings.LastIndexByte(s, '.'); i >= 0 {
		if s[i:] != ".0" {
			return PCI{}, false
		}
		s = s[:i]
	}
	parts := strings.Split(s, ":")
	if len(parts) == 2 {
		parts = append([]string{"0"}, parts...)
	}
	if len(parts) != 3 {
		return PCI{}, false
	}
	var n [3]uint32
	for i, part := range parts {
		v, err := strconv.ParseUint(part, 16, 32)
		if err != nil {
			return PCI{}, false
		}
		n[i] = uint32(v)
	}
	return PCI{Domain: n[0], Bus: n[1], Device: n[2]}, true
}

// MemoryInfo is in bytes. Total is the sum of Reserved, Free and Used.
type MemoryInfo struct {
	Total, Reserved, Free, Used uint64
}

// MemoryInfo returns the memory of the whole GPU.
func (g *GPU) MemoryInfo() (MemoryInfo, error) {
	info := MemoryInfo{Total: g.model.MemoryBytes(), Reserved: g.model.ReservedBytes()}
	for _, p := range g.m.living(g.state().Processes) {
		info.Used += p.UsedMemory
	}
	info.Free = info.Total - min(info.Used+info.Reserved, info.Total)
	return value(g, callMemoryInfo, info)
}

// AddressingMode is nvmlDeviceAddressingModeType_t.
func (g *GPU) AddressingMode() (uint32, error) {
	return value(g, "DeviceGetAddressingMode", g.model.AddressingModeType())
}

// NUMANode returns the nearest NUMA node.
func (g *GPU) NUMANode() (int, error) { return value(g, "DeviceGetMemoryAffinity", g.id.NUMANode) }

// VirtualizationMode is nvmlGpuVirtualizationMode_t: 0 none, 1 passthrough.
func (g *GPU) VirtualizationMode() (uint32, error) {
	var mode uint32
	if g.m.description.Virtualization == "passthrough" {
		mode = 1
	}
	return value(g, "DeviceGetVirtualizationMode", mode)
}

// PersistenceMode reports whether persistence mode is on.
func (g *GPU) PersistenceMode() (bool, error) {
	return fromState(g, "DeviceGetPersistenceMode", func(s GPUState) bool { return s.PersistenceMode })
}

// SetPersistenceMode sets the mode; it needs the state file.
func (g *GPU) SetPersistenceMode(on bool) error {
	return g.change("DeviceSetPersistenceMode", func(s *GPUState) error { s.PersistenceMode = on; return nil })
}

// ComputeMode is nvmlComputeMode_t.
func (g *GPU) ComputeMode() (uint32, error) {
	return fromState(g, "DeviceGetComputeMode", func(s GPUState) uint32 { return s.ComputeMode })
}

// SetComputeMode sets the mode to 0 default, 2 prohibited or 3 exclusive
// process. In MIG mode it returns NotSupported for all but the default. A
// reboot resets the mode.
func (g *GPU) SetComputeMode(mode uint32) error {
	if mode != 0 && mode != 2 && mode != 3 {
		return InvalidArgument
	}
	return g.change("DeviceSetComputeMode", func(s *GPUState) error {
		if s.MIGCurrent && mode != 0 {
			return NotSupported
		}
		s.ComputeMode = mode
		return nil
	})
}

// TimeSlice returns 0 default, 1 short, 2 medium, 3 long; NotSupported before
// Volta (assumed). It isn't an NVML call: nvidia-smi uses an interface of its
// own. Its faults have the call "ComputePolicy".
func (g *GPU) TimeSlice() (uint32, error) {
	if !g.hasTimeSlices() {
		return 0, NotSupported
	}
	return fromState(g, "ComputePolicy", func(s GPUState) uint32 { return s.TimeSlice })
}

// SetTimeSlice returns InvalidArgument for values above 3, and NotSupported in MIG
// mode (assumed). A reboot resets the time slice.
func (g *GPU) SetTimeSlice(slice uint32) error {
	if slice > 3 {
		return InvalidArgument
	}
	if !g.hasTimeSlices() {
		return NotSupported
	}
	return g.change("ComputePolicy", func(s *GPUState) error {
		if s.MIGCurrent {
			return NotSupported
		}
		s.TimeSlice = slice
		return nil
	})
}

func (g *GPU) hasTimeSlices() bool { return g.model.ArchitectureType() >= architectureVolta }

func (g *GPU) change(call string, change func(*GPUState) error) error {
	if err := g.call(call); err != nil {
		return err
	}
	return g.m.ChangeGPU(g.pos, change)
}

// ECCMode returns true if the product has ECC, otherwise NotSupported.
func (g *GPU) ECCMode() (bool, error) {
	if !g.model.ECC {
		return false, NotSupported
	}
	return value(g, "DeviceGetEccMode", true)
}

// Temperature returns the temperature in °C.
func (g *GPU) Temperature() (uint32, error) {
	return fromState(g, "DeviceGetTemperature", func(s GPUState) uint32 { return s.Temperature })
}

// PowerUsage returns the power in milliwatts.
func (g *GPU) PowerUsage() (uint32, error) {
	return fromState(g, "DeviceGetPowerUsage", func(s GPUState) uint32 { return s.PowerMilliwatts })
}

// PerformanceState is nvmlPstates_t: P0.
func (g *GPU) PerformanceState() (uint32, error) {
	return value(g, "DeviceGetPerformanceState", uint32(0))
}

// PowerLimit returns the limit in milliwatts.
func (g *GPU) PowerLimit() (uint32, error) {
	return value(g, "DeviceGetEnforcedPowerLimit", g.model.PowerLimitWatts*1000)
}

// UncorrectableErrors returns the number of uncorrectable errors of memory since
// the driver was loaded; NotSupported without ECC.
func (g *GPU) UncorrectableErrors() (uint64, error) {
	if !g.model.ECC {
		return 0, NotSupported
	}
	return fromState(g, "DeviceGetTotalEccErrors", func(s GPUState) uint64 { return s.UncorrectableErrors })
}

// SRAMThresholdExceeded reports whether the GPU has had so many uncorrectable
// errors of SRAM that it should be replaced; NotSupported without ECC and before
// Ampere (assumed).
func (g *GPU) SRAMThresholdExceeded() (bool, error) {
	if !g.model.ECC || g.model.ArchitectureType() < architectureAmpere {
		return false, NotSupported
	}
	return fromState(g, "DeviceGetSramEccErrorStatus", func(s GPUState) bool { return s.SRAMThresholdExceeded })
}

// RemappedRows returns the remapped rows of the GPU's memory; NotSupported
// without ECC, before Ampere, and with MIG instances (nvml.h).
func (g *GPU) RemappedRows() (RemappedRows, error) {
	if !g.model.ECC || g.model.ArchitectureType() < architectureAmpere || len(g.state().Instances) > 0 {
		return RemappedRows{}, NotSupported
	}
	return fromState(g, "DeviceGetRemappedRows", func(s GPUState) RemappedRows { return s.RemappedRows })
}

// RecoveryAction is field 230.
func (g *GPU) RecoveryAction() (RecoveryAction, error) {
	return fromState(g, "DeviceGetFieldValues", func(s GPUState) RecoveryAction { return s.RecoveryAction })
}

// SupportedEventTypes returns the mask of types that EventSet.Register accepts.
func (g *GPU) SupportedEventTypes() (uint64, error) {
	return value(g, "DeviceGetSupportedEventTypes", g.model.SupportedEventTypes)
}

// CommonAncestor is nvmlGpuTopologyLevel_t of two GPUs: 10 (one switch) if they
// share a root complex, 40 if they share only the NUMA node, 50 otherwise.
func (g *GPU) CommonAncestor(h *GPU) (uint32, error) {
	level := uint32(50)
	switch {
	case g.id.PCIeRoot == h.id.PCIeRoot:
		level = 10
	case g.id.NUMANode == h.id.NUMANode:
		level = 40
	}
	return value(g, "DeviceGetTopologyCommonAncestor", level)
}
