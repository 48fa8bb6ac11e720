package nvmltest

import (
	"context"
	"encoding/binary"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// The types in this file implement the methods of go-nvml's interfaces that a
// Session calls, on the engine; other methods panic, because the embedded
// interface is nil.

// code converts an engine's error to go-nvml's type.
func code(err error) gonvml.Return { return gonvml.Return(nvmlsim.Code(err)) }

func enabled(on bool) gonvml.EnableState {
	if on {
		return gonvml.FEATURE_ENABLED
	}
	return gonvml.FEATURE_DISABLED
}

// put copies a string into a fixed array of C.
func put[C int8 | uint8](dst []C, s string) {
	for i := range min(len(s), len(dst)-1) {
		dst[i] = C(s[i])
	}
}

type library struct {
	gonvml.Interface
	gonvml.ExtendedInterface
	m *nvmlsim.Machine
}

func (l library) Extensions() gonvml.ExtendedInterface { return l }
func (library) LookupSymbol(string) error              { return nil }
func (l library) Init() gonvml.Return                  { return code(l.m.Init()) }
func (l library) Shutdown() gonvml.Return              { return code(l.m.Shutdown()) }

func (l library) SystemGetDriverVersion() (string, gonvml.Return) {
	v, err := l.m.DriverVersion()
	return v, code(err)
}

func (l library) SystemGetCudaDriverVersion_v2() (int, gonvml.Return) { //nolint:revive // go-nvml's name
	v, err := l.m.CUDADriverVersion()
	return v, code(err)
}

func (l library) DeviceGetCount() (int, gonvml.Return) {
	n, err := l.m.Count()
	return n, code(err)
}

func (l library) DeviceGetHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	g, err := l.m.ByIndex(index)
	return device{g: g}, code(err)
}

func (l library) EventSetCreate() (gonvml.EventSet, gonvml.Return) {
	set, err := l.m.NewEventSet()
	return eventSet{m: l.m, set: set}, code(err)
}

type eventSet struct {
	gonvml.EventSet
	m   *nvmlsim.Machine
	set *nvmlsim.EventSet
}

func (s eventSet) Free() gonvml.Return {
	s.set.Close()
	return gonvml.SUCCESS
}

func (s eventSet) Wait(millis uint32) (gonvml.EventData, gonvml.Return) {
	e, err := s.set.Wait(context.Background(), time.Duration(millis)*time.Millisecond)
	if err != nil {
		return gonvml.EventData{}, code(err)
	}
	return gonvml.EventData{
		Device: device{g: s.m.GPUs()[e.GPU]}, EventType: uint64(e.Type), EventData: e.Data,
		GpuInstanceId: e.GPUInstance, ComputeInstanceId: e.ComputeInstance,
	}, gonvml.SUCCESS
}

// device is a GPU.
type device struct {
	gonvml.Device
	g *nvmlsim.GPU
}

// is calls a getter of the engine and converts its error.
func is[V any](get func() (V, error)) (V, gonvml.Return) {
	v, err := get()
	return v, code(err)
}

func (d device) GetUUID() (string, gonvml.Return)           { return is(d.g.UUID) }
func (d device) GetName() (string, gonvml.Return)           { return is(d.g.Name) }
func (d device) GetMinorNumber() (int, gonvml.Return)       { return is(d.g.MinorNumber) }
func (d device) GetMaxMigDeviceCount() (int, gonvml.Return) { return is(d.g.MaxMIGDeviceCount) }

func (d device) GetPciInfo() (gonvml.PciInfo, gonvml.Return) {
	p, err := d.g.PCIInfo()
	info := gonvml.PciInfo{Domain: p.Domain, Bus: p.Bus, Device: p.Device}
	put(info.BusId[:], p.BusID())
	return info, code(err)
}

func (d device) GetBrand() (gonvml.BrandType, gonvml.Return) {
	v, err := d.g.Brand()
	return gonvml.BrandType(v), code(err)
}

func (d device) GetArchitecture() (gonvml.DeviceArchitecture, gonvml.Return) {
	v, err := d.g.Architecture()
	return gonvml.DeviceArchitecture(v), code(err)
}

func (d device) GetCudaComputeCapability() (major, minor int, ret gonvml.Return) {
	v, err := d.g.CUDAComputeCapability()
	return v[0], v[1], code(err)
}

func (d device) GetMemoryInfo() (gonvml.Memory, gonvml.Return) {
	v, err := d.g.MemoryInfo()
	return gonvml.Memory{Total: v.Total, Free: v.Free, Used: v.Used}, code(err)
}

func (d device) GetMemoryInfo_v2() (gonvml.Memory_v2, gonvml.Return) { //nolint:revive // go-nvml's name
	v, err := d.g.MemoryInfo()
	return gonvml.Memory_v2{Total: v.Total, Reserved: v.Reserved, Free: v.Free, Used: v.Used}, code(err)
}

func (d device) GetComputeMode() (gonvml.ComputeMode, gonvml.Return) {
	v, err := d.g.ComputeMode()
	return gonvml.ComputeMode(v), code(err)
}

func (d device) SetComputeMode(mode gonvml.ComputeMode) gonvml.Return {
	return code(d.g.SetComputeMode(uint32(mode)))
}

func (d device) GetEccMode() (current, pending gonvml.EnableState, ret gonvml.Return) {
	v, err := d.g.ECCMode()
	return enabled(v), enabled(v), code(err)
}

func (d device) GetVirtualizationMode() (gonvml.GpuVirtualizationMode, gonvml.Return) {
	v, err := d.g.VirtualizationMode()
	return gonvml.GpuVirtualizationMode(v), code(err)
}

func (d device) GetAddressingMode() (gonvml.DeviceAddressingMode, gonvml.Return) {
	v, err := d.g.AddressingMode()
	return gonvml.DeviceAddressingMode{Value: v}, code(err)
}

func (d device) GetNvLinkState(link int) (gonvml.EnableState, gonvml.Return) {
	active, err := d.g.NVLinkState(link)
	return enabled(active), code(err)
}

func (d device) GetNvLinkRemotePciInfo(link int) (gonvml.PciInfo, gonvml.Return) {
	l, err := d.g.NVLinkRemote(link)
	info := gonvml.PciInfo{Domain: l.Remote.Domain, Bus: l.Remote.Bus, Device: l.Remote.Device}
	put(info.BusId[:], l.Remote.BusID())
	return info, code(err)
}

func (d device) GetNvLinkRemoteDeviceType(link int) (gonvml.IntNvLinkDeviceType, gonvml.Return) {
	l, err := d.g.NVLinkRemote(link)
	return gonvml.IntNvLinkDeviceType(l.DeviceType()), code(err)
}

// GetFieldValues has the recovery action only.
func (d device) GetFieldValues(values []gonvml.FieldValue) gonvml.Return {
	for i := range values {
		v := &values[i]
		if v.FieldId != gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION {
			v.NvmlReturn = uint32(gonvml.ERROR_NOT_SUPPORTED)
			continue
		}
		action, err := d.g.RecoveryAction()
		if ret := code(err); ret == gonvml.ERROR_GPU_IS_LOST || ret == gonvml.ERROR_RESET_REQUIRED {
			return ret
		}
		v.ValueType, v.NvmlReturn = uint32(gonvml.VALUE_TYPE_UNSIGNED_INT), uint32(code(err))
		binary.NativeEndian.PutUint32(v.Value[:], uint32(action))
	}
	return gonvml.SUCCESS
}

func (d device) GetRemappedRows() (correctable, uncorrectable int, pending, failed bool, ret gonvml.Return) {
	r, err := d.g.RemappedRows()
	return int(r.Correctable), int(r.Uncorrectable), r.Pending, r.Failed, code(err)
}

func (d device) GetSramEccErrorStatus() (gonvml.EccSramErrorStatus, gonvml.Return) {
	exceeded, err := d.g.SRAMThresholdExceeded()
	return gonvml.EccSramErrorStatus{BThresholdExceeded: uint32(enabled(exceeded))}, code(err)
}

func (d device) GetGpuFabricInfo() (gonvml.GpuFabricInfo, gonvml.Return) {
	v, err := d.g.FabricInfo()
	return gonvml.GpuFabricInfo{State: v.State, Status: uint32(v.Status)}, code(err)
}

func (d device) GetSupportedEventTypes() (uint64, gonvml.Return) { return is(d.g.SupportedEventTypes) }

func (d device) RegisterEvents(types uint64, set gonvml.EventSet) gonvml.Return {
	s, ok := set.(eventSet)
	if !ok {
		return gonvml.ERROR_INVALID_ARGUMENT
	}
	return code(s.set.Register(d.g, nvmlsim.EventType(types)))
}

func processes(all []nvmlsim.Process, err error) ([]gonvml.ProcessInfo, gonvml.Return) {
	infos := make([]gonvml.ProcessInfo, len(all))
	for i, p := range all {
		infos[i] = gonvml.ProcessInfo{Pid: p.PID, UsedGpuMemory: p.UsedMemory, GpuInstanceId: p.GPUInstance, ComputeInstanceId: p.ComputeInstance}
	}
	return infos, code(err)
}

func (d device) GetComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return processes(d.g.Processes())
}

func (d device) GetMPSComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return processes(d.g.MPSProcesses())
}

func (device) GetGraphicsRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return nil, gonvml.SUCCESS
}

func (d device) GetUtilizationRates() (gonvml.Utilization, gonvml.Return) {
	percent, err := d.g.Utilization()
	return gonvml.Utilization{Gpu: percent}, code(err)
}

func (d device) GetProcessUtilization(since uint64) ([]gonvml.ProcessUtilizationSample, gonvml.Return) {
	busy, err := d.g.ProcessUtilization()
	now := uint64(time.Now().UnixMicro())
	if err == nil && since >= now {
		return nil, gonvml.ERROR_NOT_FOUND
	}
	all := make([]gonvml.ProcessUtilizationSample, len(busy))
	for i, p := range busy {
		all[i] = gonvml.ProcessUtilizationSample{Pid: p.PID, TimeStamp: now, SmUtil: p.Utilization}
	}
	return all, code(err)
}

func (l library) GpmSampleAlloc() (gonvml.GpmSample, gonvml.Return) {
	s, err := l.m.NewGPMSample()
	return gpmSample{s}, code(err)
}

func (library) GpmMetricsGet(get *gonvml.GpmMetricsGetType) gonvml.Return {
	percent, err := get.Sample1.(gpmSample).s.GPMUtilization(get.Sample2.(gpmSample).s)
	for i := range get.NumMetrics {
		get.Metrics[i].NvmlReturn, get.Metrics[i].Value = uint32(gonvml.SUCCESS), percent
	}
	return code(err)
}

// gpmSample is a sample of performance counters.
type gpmSample struct{ s *nvmlsim.GPMSample }

func (x gpmSample) Free() gonvml.Return { return code(x.s.Free()) }

func (x gpmSample) Get(d gonvml.Device) gonvml.Return { return code(x.s.Get(d.(device).g)) }

func (x gpmSample) MigGet(d gonvml.Device, instance int) gonvml.Return {
	return code(x.s.GetInstance(d.(device).g, uint32(instance)))
}

func (d device) GpmQueryDeviceSupport() (gonvml.GpmSupport, gonvml.Return) {
	supported, err := d.g.GPMSupported()
	return gonvml.GpmSupport{IsSupportedDevice: uint32(enabled(supported))}, code(err)
}

func (d device) GpmMigSampleGet(instance int, into gonvml.GpmSample) gonvml.Return {
	return into.MigGet(d, instance)
}

func (d device) GetMigMode() (current, pending int, ret gonvml.Return) {
	now, next, err := d.g.MIGMode()
	return int(enabled(now)), int(enabled(next)), code(err)
}

func (d device) SetMigMode(mode int) (activation, ret gonvml.Return) {
	a, err := d.g.SetMIGMode(mode == gonvml.DEVICE_MIG_ENABLE)
	return gonvml.Return(a), code(err)
}

func (d device) GetMigDeviceHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	c, err := d.g.MIGDevice(index)
	return migDevice{c: c}, code(err)
}

func (d device) GetGpuInstanceProfileInfo(enum int) (gonvml.GpuInstanceProfileInfo, gonvml.Return) {
	p, err := d.g.ProfileByEnum(uint32(enum))
	return gonvml.GpuInstanceProfileInfo{
		Id: p.ID, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount, MultiprocessorCount: p.MultiprocessorCount,
		CopyEngineCount: p.CopyEngineCount, DecoderCount: p.DecoderCount, EncoderCount: p.EncoderCount, JpegCount: p.JPEGCount,
		OfaCount: p.OFACount, MemorySizeMB: p.MemorySizeMB,
	}, code(err)
}

func (d device) GetGpuInstancePossiblePlacements(info *gonvml.GpuInstanceProfileInfo) ([]gonvml.GpuInstancePlacement, gonvml.Return) {
	starts, size, err := d.g.PossiblePlacements(info.Id)
	all := make([]gonvml.GpuInstancePlacement, len(starts))
	for i, s := range starts {
		all[i] = gonvml.GpuInstancePlacement{Start: s, Size: size}
	}
	return all, code(err)
}

func (d device) GetGpuInstances(info *gonvml.GpuInstanceProfileInfo) ([]gonvml.GpuInstance, gonvml.Return) {
	some, err := d.g.Instances(info.Id)
	all := make([]gonvml.GpuInstance, len(some))
	for i, x := range some {
		all[i] = gpuInstance{i: x}
	}
	return all, code(err)
}

func (d device) CreateGpuInstanceWithPlacement(info *gonvml.GpuInstanceProfileInfo, at *gonvml.GpuInstancePlacement) (gonvml.GpuInstance, gonvml.Return) {
	i, err := d.g.CreateInstance(info.Id, &at.Start)
	return gpuInstance{i: i}, code(err)
}

// migDevice is a MIG device.
type migDevice struct {
	gonvml.Device
	c nvmlsim.Compute
}

func (d migDevice) GetUUID() (string, gonvml.Return) { return is(d.c.UUID) }

func (d migDevice) GetGpuInstanceId() (int, gonvml.Return) { //nolint:revive // go-nvml's name
	gi, err := d.c.GPUInstanceID()
	return int(gi), code(err)
}

func (d migDevice) GetComputeInstanceId() (int, gonvml.Return) { //nolint:revive // go-nvml's name
	ci, err := d.c.ComputeInstanceID()
	return int(ci), code(err)
}

func (d migDevice) GetAttributes() (gonvml.DeviceAttributes, gonvml.Return) {
	p, c, err := d.c.Attributes()
	return gonvml.DeviceAttributes{GpuInstanceSliceCount: p.SliceCount, ComputeInstanceSliceCount: c.SliceCount, MemorySizeMB: p.MemorySizeMB}, code(err)
}

func (d migDevice) GetComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return processes(d.c.Processes())
}

func (d migDevice) GetMPSComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return processes(d.c.MPSProcesses())
}

func (migDevice) GetGraphicsRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return nil, gonvml.SUCCESS
}

func (d migDevice) GetMemoryInfo() (gonvml.Memory, gonvml.Return) {
	v, err := d.c.MemoryInfo()
	return gonvml.Memory{Total: v.Total, Free: v.Free, Used: v.Total - v.Free}, code(err)
}

func (d migDevice) GetMemoryInfo_v2() (gonvml.Memory_v2, gonvml.Return) { //nolint:revive // go-nvml's name
	v, err := d.c.MemoryInfo()
	return gonvml.Memory_v2{Total: v.Total, Reserved: v.Reserved, Free: v.Free, Used: v.Used}, code(err)
}

type gpuInstance struct {
	gonvml.GpuInstance
	i nvmlsim.Instance
}

func (x gpuInstance) Destroy() gonvml.Return { return code(x.i.Destroy()) }

func (x gpuInstance) GetInfo() (gonvml.GpuInstanceInfo, gonvml.Return) {
	v, err := x.i.Info()
	return gonvml.GpuInstanceInfo{
		Device: device{g: x.i.GPU()}, Id: v.ID, ProfileId: v.Profile,
		Placement: gonvml.GpuInstancePlacement{Start: v.Start, Size: v.Size},
	}, code(err)
}

func (x gpuInstance) GetComputeInstanceProfileInfo(enum, _ int) (gonvml.ComputeInstanceProfileInfo, gonvml.Return) {
	p, err := x.i.ComputeProfile(uint32(enum))
	return gonvml.ComputeInstanceProfileInfo{Id: p.ID, SliceCount: p.SliceCount, InstanceCount: p.InstanceCount, MultiprocessorCount: p.MultiprocessorCount}, code(err)
}

func (x gpuInstance) CreateComputeInstance(info *gonvml.ComputeInstanceProfileInfo) (gonvml.ComputeInstance, gonvml.Return) {
	c, err := x.i.CreateCompute(info.Id, nil)
	return computeInstance{c: c}, code(err)
}

func (x gpuInstance) GetComputeInstanceById(id int) (gonvml.ComputeInstance, gonvml.Return) { //nolint:revive // go-nvml's name
	c, err := x.i.ComputeByID(uint32(id))
	return computeInstance{c: c}, code(err)
}

type computeInstance struct {
	gonvml.ComputeInstance
	c nvmlsim.Compute
}

func (x computeInstance) Destroy() gonvml.Return { return code(x.c.Destroy()) }

// GetGpuInstanceProfileInfoV has no answer: go-nvml's handler calls a library.
func (device) GetGpuInstanceProfileInfoV(int) gonvml.GpuInstanceProfileInfoHandler {
	return gonvml.GpuInstanceProfileInfoHandler{}
}
