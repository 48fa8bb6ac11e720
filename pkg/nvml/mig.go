package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// MIG reads the current MIG state of a GPU: mode, profiles and all GPU
// instances, including those without compute instance. It may or may not
// include an instance that is created or destroyed during the call. It returns
// ErrNotSupported for a GPU without MIG, ErrLost for one that is lost or isn't
// listed, and ErrNotResponding.
func (s *Session) MIG(uuid gpu.UUID) (gpu.MIG, error) {
	return onGPU(s, uuid, reads, "read MIG", s.limits.read, func(handle gonvml.Device, object string) (gpu.MIG, error) {
		mig, err := s.readMIG(handle, uuid, object)
		if err != nil {
			return gpu.MIG{}, err
		}
		if mig == nil {
			return gpu.MIG{}, fmt.Errorf("read MIG %s: %w", object, ErrNotSupported)
		}
		return *mig, nil
	})
}

// readMIG returns nil for a GPU without MIG. A GPU that has a MIG mode but no
// profiles (some guests) counts as one without.
func (s *Session) readMIG(handle gonvml.Device, uuid gpu.UUID, object string) (*gpu.MIG, error) {
	mig, err := s.readMode(handle, uuid, object)
	if errors.Is(err, ErrNotSupported) {
		return nil, nil //nolint:nilnil // nil is the documented value for "no MIG"
	}
	if err != nil {
		return nil, err
	}
	profiles, err := s.profilesOf(handle, uuid, object)
	if err != nil {
		return nil, err
	}
	if len(profiles) == 0 && !mig.Enabled {
		return nil, nil //nolint:nilnil // as above
	}
	var there []instance
	if mig.Enabled {
		there, err = readInstances(handle, profiles, object)
	}
	if errors.Is(err, ErrNotSupported) { // the mode was switched off in the meantime, or a guest can't see instances
		mig, err = s.readMode(handle, uuid, object)
	}
	for _, i := range there {
		mig.Instances = append(mig.Instances, i.Instance)
	}
	mig.Profiles = profiles
	return &mig, err
}

func (s *Session) readMode(handle gonvml.Device, uuid gpu.UUID, object string) (gpu.MIG, error) {
	current, pending, ret := handle.GetMigMode()
	if err := wrap(ret, "nvmlDeviceGetMigMode", object); err != nil {
		return gpu.MIG{}, err
	}
	s.noteMIGMode(uuid, current, pending)
	can, err := switchable(handle, object)
	return gpu.MIG{
		Enabled:    current == gonvml.DEVICE_MIG_ENABLE,
		Pending:    pending == gonvml.DEVICE_MIG_ENABLE,
		Switchable: current == pending && can,
	}, err
}

// switchable reports whether a MIG mode takes effect at once and affects only
// this GPU: from Hopper on (MIG user guide), and not in a guest, where the
// hypervisor controls it. It returns false if the driver doesn't report it.
func switchable(handle gonvml.Device, object string) (bool, error) {
	architecture, ret := handle.GetArchitecture()
	if err := wrap(ret, "nvmlDeviceGetArchitecture", object); err != nil {
		return false, failure(err)
	}
	if architecture == gonvml.DEVICE_ARCH_UNKNOWN || architecture < gonvml.DEVICE_ARCH_HOPPER {
		return false, nil
	}
	mode, err := readVirtualization(handle, object)
	if err != nil {
		return false, failure(err)
	}
	return mode == "none" || mode == "host-vgpu" || mode == "host-vsga", nil
}

func readVirtualization(handle gonvml.Device, object string) (string, error) {
	mode, ret := handle.GetVirtualizationMode()
	if err := wrap(ret, "nvmlDeviceGetVirtualizationMode", object); err != nil {
		return "", err
	}
	switch mode {
	case gonvml.GPU_VIRTUALIZATION_MODE_NONE:
		return "none", nil
	case gonvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH:
		return "passthrough", nil
	case gonvml.GPU_VIRTUALIZATION_MODE_VGPU:
		return "vgpu", nil
	case gonvml.GPU_VIRTUALIZATION_MODE_HOST_VGPU:
		return "host-vgpu", nil
	case gonvml.GPU_VIRTUALIZATION_MODE_HOST_VSGA:
		return "host-vsga", nil
	default:
		return "", nil
	}
}

// profilesOf lists the MIG profiles of a GPU, in NVML's order. They are read
// only once, because that takes about fifty calls.
func (s *Session) profilesOf(handle gonvml.Device, uuid gpu.UUID, object string) ([]gpu.Profile, error) {
	if known, ok := s.profiles.Load(uuid); ok {
		return slices.Clone(known.([]gpu.Profile)), nil
	}
	memory, err := readMemory(handle, object)
	if failure(err) != nil {
		return nil, err
	}
	var all []gpu.Profile
	for i := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		p, err := readProfile(s.devices, handle, i, uint64(memory))
		if errors.Is(err, ErrNotSupported) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("MIG profile %d %s: %w", i, object, err)
		}
		all = append(all, p)
	}
	s.profiles.Store(uuid, all)
	return slices.Clone(all), nil
}

func readProfile(lib device.Interface, handle gonvml.Device, enum int, totalBytes uint64) (gpu.Profile, error) {
	info, ret := handle.GetGpuInstanceProfileInfo(enum)
	if ret == gonvml.ERROR_INVALID_ARGUMENT {
		ret = gonvml.ERROR_NOT_SUPPORTED // an enum newer than the driver
	}
	if err := wrap(ret, "nvmlDeviceGetGpuInstanceProfileInfo", ""); err != nil {
		return gpu.Profile{}, err
	}
	placements, ret := handle.GetGpuInstancePossiblePlacements(&info)
	if err := wrap(ret, "nvmlDeviceGetGpuInstancePossiblePlacements", ""); err != nil {
		return gpu.Profile{}, err
	}
	name, err := profileName(lib, handle, enum, info, totalBytes)
	if err != nil {
		return gpu.Profile{}, err
	}
	p := gpu.Profile{
		Name:         name,
		ID:           int(info.Id),
		MaxInstances: int(info.InstanceCount),
		MemoryBytes:  int64(info.MemorySizeMB) << 20,
		Engines: gpu.Engines{
			Multiprocessors: int(info.MultiprocessorCount),
			CopyEngines:     int(info.CopyEngineCount),
			Decoders:        int(info.DecoderCount),
			Encoders:        int(info.EncoderCount),
			JPEGEngines:     int(info.JpegCount),
			OFAEngines:      int(info.OfaCount),
		},
	}
	for _, pl := range placements {
		p.Placements = append(p.Placements, gpu.Placement{Start: int(pl.Start), Size: int(pl.Size)})
	}
	return p, nil
}

// profileName returns NVML's name of the profile, or, with drivers too old to
// have it, the name that go-nvlib derives.
func profileName(lib device.Interface, handle gonvml.Device, enum int, info gonvml.GpuInstanceProfileInfo, totalBytes uint64) (string, error) {
	h := handle.GetGpuInstanceProfileInfoV(enum)
	if h == (gonvml.GpuInstanceProfileInfoHandler{}) {
		return derivedName(lib, enum, info, totalBytes)
	}
	if v2, ret := h.V2(); ret == gonvml.SUCCESS {
		if name := strings.TrimPrefix(cString(v2.Name[:]), "MIG "); name != "" {
			return name, nil
		}
	}
	return derivedName(lib, enum, info, totalBytes)
}

func derivedName(lib device.Interface, enum int, info gonvml.GpuInstanceProfileInfo, totalBytes uint64) (string, error) {
	if totalBytes == 0 {
		return "", fmt.Errorf("name MIG profile %d of a GPU without memory of its own: %w", enum, ErrNotSupported)
	}
	ci := computeProfile(enum)
	p, err := lib.NewMigProfile(enum, ci, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, info.MemorySizeMB, totalBytes)
	if err != nil {
		return "", fmt.Errorf("name MIG profile %d: %w (%w)", enum, ErrNotSupported, err)
	}
	return p.String(), nil
}

// computeProfile returns the compute instance profile that takes a whole GPU
// instance of the given profile: the one with the same number of slices.
func computeProfile(enum int) int {
	switch enum {
	case gonvml.GPU_INSTANCE_PROFILE_2_SLICE, gonvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1, gonvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX,
		gonvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME, gonvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME:
		return gonvml.COMPUTE_INSTANCE_PROFILE_2_SLICE
	case gonvml.GPU_INSTANCE_PROFILE_3_SLICE:
		return gonvml.COMPUTE_INSTANCE_PROFILE_3_SLICE
	case gonvml.GPU_INSTANCE_PROFILE_4_SLICE, gonvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:
		return gonvml.COMPUTE_INSTANCE_PROFILE_4_SLICE
	case gonvml.GPU_INSTANCE_PROFILE_6_SLICE:
		return gonvml.COMPUTE_INSTANCE_PROFILE_6_SLICE
	case gonvml.GPU_INSTANCE_PROFILE_7_SLICE:
		return gonvml.COMPUTE_INSTANCE_PROFILE_7_SLICE
	case gonvml.GPU_INSTANCE_PROFILE_8_SLICE:
		return gonvml.COMPUTE_INSTANCE_PROFILE_8_SLICE
	default:
		return gonvml.COMPUTE_INSTANCE_PROFILE_1_SLICE
	}
}

// instance is a GPU instance with the handles needed to change it.
type instance struct {
	gpu.Instance
	handle gonvml.GpuInstance
	// devices are its compute instances.
	devices []migDevice
}

// migDevice is a compute instance and its MIG device.
type migDevice struct {
	handle    gonvml.Device
	uuid      gpu.UUID
	computeID int
	// whole means that it has all slices of its GPU instance.
	whole bool
}

// readInstances lists the GPU instances of a GPU whose mode is on, by id. It
// gets the handles first and their data last, so that an instance that is
// destroyed in the meantime is omitted and not listed without its compute
// instance.
func readInstances(handle gonvml.Device, profiles []gpu.Profile, object string) ([]instance, error) {
	handles := map[string][]gonvml.GpuInstance{} // by profile
	for _, p := range profiles {
		some, ret := handle.GetGpuInstances(&gonvml.GpuInstanceProfileInfo{Id: uint32(p.ID), InstanceCount: uint32(max(p.MaxInstances, 1))})
		if err := wrap(ret, "nvmlDeviceGetGpuInstances", object); err != nil {
			return nil, err
		}
		handles[p.Name] = some
	}
	devices, err := readMIGDevices(handle, object)
	if err != nil {
		return nil, err
	}
	var all []instance
	for profile, some := range handles {
		for _, h := range some {
			info, ret := h.GetInfo()
			if gone(ret) {
				continue
			}
			if err := wrap(ret, "nvmlGpuInstanceGetInfo", object); err != nil {
				return nil, err
			}
			all = append(all, newInstance(h, info, profile, devices[int(info.Id)]))
		}
	}
	slices.SortFunc(all, func(a, b instance) int { return cmp.Compare(a.GPUInstanceID, b.GPUInstanceID) })
	return all, nil
}

func newInstance(h gonvml.GpuInstance, info gonvml.GpuInstanceInfo, profile string, devices []migDevice) instance {
	i := instance{handle: h, devices: devices, Instance: gpu.Instance{
		Profile:       profile,
		Placement:     gpu.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)},
		GPUInstanceID: int(info.Id), ComputeInstanceID: gpu.NoComputeInstance,
	}}
	if len(devices) == 1 && devices[0].whole {
		i.UUID, i.ComputeInstanceID = devices[0].uuid, devices[0].computeID
	}
	return i
}

// gone reports whether the object of a handle no longer exists.
func gone(ret gonvml.Return) bool {
	return ret == gonvml.ERROR_NOT_FOUND || ret == gonvml.ERROR_INVALID_ARGUMENT
}

// readMIGDevices lists the MIG devices of a GPU by the id of their GPU
// instance. It walks their indexes, because in nvml.h a compute instance has
// only the parent's handle.
func readMIGDevices(handle gonvml.Device, object string) (map[int][]migDevice, error) {
	count, ret := handle.GetMaxMigDeviceCount()
	if err := wrap(ret, "nvmlDeviceGetMaxMigDeviceCount", object); err != nil {
		return nil, err
	}
	all := map[int][]migDevice{}
	for i := range count {
		h, ret := handle.GetMigDeviceHandleByIndex(i)
		if gone(ret) {
			continue
		}
		if err := wrap(ret, "nvmlDeviceGetMigDeviceHandleByIndex", object); err != nil {
			return nil, err
		}
		gi, d, ret := readMIGDevice(h)
		if gone(ret) {
			continue
		}
		if err := wrap(ret, "read MIG device", object); err != nil {
			return nil, err
		}
		all[gi] = append(all[gi], d)
	}
	return all, nil
}

func readMIGDevice(h gonvml.Device) (gpuInstance int, d migDevice, ret gonvml.Return) {
	gpuInstance, ret = h.GetGpuInstanceId()
	if ret != gonvml.SUCCESS {
		return gpuInstance, d, ret
	}
	compute, ret := h.GetComputeInstanceId()
	if ret != gonvml.SUCCESS {
		return gpuInstance, d, ret
	}
	uuid, ret := h.GetUUID()
	if ret != gonvml.SUCCESS {
		return gpuInstance, d, ret
	}
	attributes, ret := h.GetAttributes()
	return gpuInstance, migDevice{
		handle: h, uuid: gpu.UUID(uuid), computeID: compute,
		whole: attributes.ComputeInstanceSliceCount == attributes.GpuInstanceSliceCount,
	}, ret
}

// noteMIGMode stores whether the GPU's MIG mode is on or pending.
func (s *Session) noteMIGMode(uuid gpu.UUID, current, pending int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.migOn[uuid] = current == gonvml.DEVICE_MIG_ENABLE || pending == gonvml.DEVICE_MIG_ENABLE
}

func (s *Session) isMIGOn(uuid gpu.UUID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.migOn[uuid]
}
