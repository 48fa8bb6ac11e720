package nvml

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// CreateInstance creates the partition: a GPU instance at its placement and the
// compute instance that takes all of it. It is not idempotent. On failure it
// undoes its changes; if that fails too, the error says both. If the process
// dies in between, a GPU instance without compute instance is left, which MIG
// lists.
//
// It returns ErrInsufficientResources, which always means that nothing is left, if the placement isn't free or the
// engines are used up; ErrNotSupported if the GPU has no such profile or placement, or its MIG mode is off;
// ErrNoPermission; ErrNotResponding, and then the instance may still be created later.
func (s *Session) CreateInstance(p gpu.Partition) (gpu.Instance, error) {
	made, err := s.create(p)
	if err != nil {
		return gpu.Instance{}, fmt.Errorf("create MIG instance %s at %d of GPU %s: %w", p.Profile, p.Placement.Start, p.GPU, err)
	}
	return made, nil
}

func (s *Session) create(p gpu.Partition) (gpu.Instance, error) {
	return onGPU(s, p.GPU, changes, "create a MIG instance", s.limits.change, func(handle gonvml.Device, object string) (gpu.Instance, error) {
		return s.createOn(handle, object, p)
	})
}

func (s *Session) createOn(handle gonvml.Device, object string, p gpu.Partition) (gpu.Instance, error) {
	info, err := s.profileFor(handle, p, object)
	if err != nil {
		return gpu.Instance{}, err
	}
	at := gonvml.GpuInstancePlacement{Start: uint32(p.Placement.Start), Size: uint32(p.Placement.Size)}
	gi, ret := handle.CreateGpuInstanceWithPlacement(&info, &at)
	if err := wrap(ret, "nvmlDeviceCreateGpuInstanceWithPlacement", ""); err != nil {
		return gpu.Instance{}, err
	}
	made, ci, err := complete(handle, gi, info, p)
	if err == nil {
		return made, nil
	}
	if left := undo(gi, ci); left != nil {
		return gpu.Instance{}, fmt.Errorf("%v; %w", err, left) //nolint:errorlint // it may say that there was no room, but something is there now
	}
	return gpu.Instance{}, err
}

// profileFor returns the partition's profile and its placement, if it is a
// possible one.
func (s *Session) profileFor(handle gonvml.Device, p gpu.Partition, object string) (gonvml.GpuInstanceProfileInfo, error) {
	profiles, err := s.profilesOf(handle, p.GPU, object)
	if err != nil {
		return gonvml.GpuInstanceProfileInfo{}, err
	}
	i := slices.IndexFunc(profiles, func(q gpu.Profile) bool { return q.Name == p.Profile })
	if i < 0 {
		return gonvml.GpuInstanceProfileInfo{}, fmt.Errorf("the GPU has no such profile: %w", ErrNotSupported)
	}
	if !slices.Contains(profiles[i].Placements, p.Placement) {
		return gonvml.GpuInstanceProfileInfo{}, fmt.Errorf("the profile has no placement %d:%d: %w", p.Placement.Start, p.Placement.Size, ErrNotSupported)
	}
	for enum := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := handle.GetGpuInstanceProfileInfo(enum)
		if ret == gonvml.SUCCESS && info.Id == uint32(profiles[i].ID) {
			return info, nil
		}
	}
	return gonvml.GpuInstanceProfileInfo{}, fmt.Errorf("profile id %d: %w", profiles[i].ID, ErrNotSupported)
}

// complete creates the compute instance that takes all of a GPU instance, and
// returns it even if reading it back fails.
func complete(handle gonvml.Device, gi gonvml.GpuInstance, profile gonvml.GpuInstanceProfileInfo, p gpu.Partition) (gpu.Instance, gonvml.ComputeInstance, error) {
	info, ret := gi.GetInfo()
	if err := wrap(ret, "nvmlGpuInstanceGetInfo", ""); err != nil {
		return gpu.Instance{}, nil, err
	}
	if info.ProfileId != profile.Id || int(info.Placement.Start) != p.Placement.Start || int(info.Placement.Size) != p.Placement.Size {
		return gpu.Instance{}, nil, fmt.Errorf("the driver made a GPU instance of profile %d at %d:%d", info.ProfileId, info.Placement.Start, info.Placement.Size)
	}
	whole, err := wholeCompute(gi, profile.SliceCount)
	if err != nil {
		return gpu.Instance{}, nil, err
	}
	ci, ret := gi.CreateComputeInstance(&whole)
	if err := wrap(ret, "nvmlGpuInstanceCreateComputeInstance", ""); err != nil {
		return gpu.Instance{}, nil, err
	}
	devices, err := readMIGDevices(handle, "")
	if err != nil {
		return gpu.Instance{}, ci, err
	}
	made := newInstance(gi, info, p.Profile, devices[int(info.Id)])
	if made.UUID == "" {
		return gpu.Instance{}, ci, fmt.Errorf("GPU instance %d shows no MIG device: %w", info.Id, ErrNotFound)
	}
	return made.Instance, ci, nil
}

// wholeCompute returns the compute instance profile that takes all of a GPU
// instance: the one with the same number of slices. If there are several, it is
// the one with the most multiprocessors, because a profile of double memory has
// more.
func wholeCompute(gi gonvml.GpuInstance, slices uint32) (gonvml.ComputeInstanceProfileInfo, error) {
	var whole gonvml.ComputeInstanceProfileInfo
	for enum := range gonvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, ret := gi.GetComputeInstanceProfileInfo(enum, gonvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if ret == gonvml.ERROR_INVALID_ARGUMENT {
			continue // an enum newer than the driver
		}
		err := wrap(ret, "nvmlGpuInstanceGetComputeInstanceProfileInfo", "")
		if errors.Is(err, ErrNotSupported) {
			continue
		}
		if err != nil {
			return whole, err
		}
		if info.SliceCount == slices && info.MultiprocessorCount > whole.MultiprocessorCount {
			whole = info
		}
	}
	if whole.SliceCount == 0 {
		return whole, fmt.Errorf("no compute instance profile takes all of the GPU instance: %w", ErrNotSupported)
	}
	return whole, nil
}

// undo destroys the instances that CreateInstance has created.
func undo(gi gonvml.GpuInstance, ci gonvml.ComputeInstance) error {
	if ci != nil {
		if err := wrap(ci.Destroy(), "undo: nvmlComputeInstanceDestroy", ""); err != nil {
			return err
		}
	}
	return wrap(gi.Destroy(), "undo: nvmlGpuInstanceDestroy", "")
}

// DestroyInstance destroys an instance that is exactly the wanted one: UUID,
// GPU instance id, compute instance id, profile and placement all agree. With
// want.ComputeInstanceID NoComputeInstance (and no UUID) that is a GPU instance
// without compute instance. It returns when the instance is gone. A crash or
// failure in between may leave a GPU instance without compute instance, which
// MIG lists and which can be destroyed as described.
//
// It returns ErrNotFound if no GPU instance has the id, or the mode is off;
// ErrMismatch, with nothing destroyed, if the instance with the id differs from
// the wanted one; ErrInUse, naming the processes, while processes use it;
// ErrNoPermission; ErrNotResponding, and then the instance may still be
// destroyed later.
func (s *Session) DestroyInstance(uuid gpu.UUID, want gpu.Instance) error {
	if err := s.destroy(uuid, want); err != nil {
		return fmt.Errorf("destroy MIG instance %s at %d (GPU instance %d) of GPU %s: %w", want.Profile, want.Placement.Start, want.GPUInstanceID, uuid, err)
	}
	return nil
}

func (s *Session) destroy(uuid gpu.UUID, want gpu.Instance) error {
	return s.change(uuid, "destroy a MIG instance", func(handle gonvml.Device, object string) error {
		return s.destroyOn(handle, object, uuid, want)
	})
}

func (s *Session) destroyOn(handle gonvml.Device, object string, uuid gpu.UUID, want gpu.Instance) error {
	current, _, ret := handle.GetMigMode()
	if err := wrap(ret, "nvmlDeviceGetMigMode", ""); err != nil {
		return err
	}
	if current != gonvml.DEVICE_MIG_ENABLE {
		return fmt.Errorf("MIG mode is off: %w", ErrNotFound)
	}
	profiles, err := s.profilesOf(handle, uuid, object)
	if err != nil {
		return err
	}
	all, err := readInstances(handle, profiles, object)
	if errors.Is(err, ErrNotSupported) {
		return fmt.Errorf("MIG mode has just been switched off: %w", ErrNotFound)
	}
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(i instance) bool { return i.GPUInstanceID == want.GPUInstanceID })
	if i < 0 {
		return ErrNotFound
	}
	there := all[i]
	if there.Instance != want || (want.ComputeInstanceID == gpu.NoComputeInstance && len(there.devices) > 0) {
		return fmt.Errorf("%w: %s at %d:%d with %d compute instances, MIG device %q", ErrMismatch,
			there.Profile, there.Placement.Start, there.Placement.Size, len(there.devices), there.UUID)
	}
	samples := s.takeSamples(uuid)
	samples.free(want.GPUInstanceID)
	s.keepSamples(uuid, samples)
	return there.destroy()
}

func (i instance) destroy() error {
	if i.ComputeInstanceID != gpu.NoComputeInstance {
		ci, ret := i.handle.GetComputeInstanceById(i.ComputeInstanceID)
		if err := wrap(ret, "nvmlGpuInstanceGetComputeInstanceById", ""); err != nil {
			return err
		}
		if err := wrap(ci.Destroy(), "nvmlComputeInstanceDestroy", ""); err != nil {
			return usedBy(err, i.devices[0].handle)
		}
	}
	return wrap(i.handle.Destroy(), "nvmlGpuInstanceDestroy", "")
}

// usedBy adds the processes that use a device to an ErrInUse.
func usedBy(err error, handle gonvml.Device) error {
	if !errors.Is(err, ErrInUse) {
		return err
	}
	var pids []uint32
	for _, list := range []func() ([]gonvml.ProcessInfo, gonvml.Return){
		handle.GetComputeRunningProcesses, handle.GetMPSComputeRunningProcesses, handle.GetGraphicsRunningProcesses,
	} {
		all, ret := list()
		if ret != gonvml.SUCCESS {
			continue // err is returned anyway
		}
		for _, p := range all {
			pids = append(pids, p.Pid)
		}
	}
	if len(pids) == 0 {
		return fmt.Errorf("%w; NVML lists no process, but a monitor such as DCGM may hold it", err)
	}
	slices.Sort(pids)
	return fmt.Errorf("%w by process %s", err, strings.Trim(strings.ReplaceAll(fmt.Sprint(slices.Compact(pids)), " ", ", "), "[]"))
}

// SetMIGMode switches the MIG mode of a GPU on or off and returns when the mode
// is in effect. It is idempotent. It changes nothing and returns
// ErrNotSwitchable unless gpu.MIG.Switchable is true. It returns ErrInUse,
// naming the processes, while processes use the GPU or, to switch off, while it
// has instances; a change that would take effect only at the next reset is
// undone. It returns ErrNotSupported for a GPU without MIG; ErrNoPermission;
// ErrNotResponding, and then the mode may still change later.
func (s *Session) SetMIGMode(uuid gpu.UUID, on bool) error {
	if err := s.setMIGMode(uuid, on); err != nil {
		return fmt.Errorf("switch MIG mode of GPU %s %s: %w", uuid, onOff(on), err)
	}
	return nil
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

func (s *Session) setMIGMode(uuid gpu.UUID, on bool) error {
	return s.change(uuid, "switch the MIG mode", func(handle gonvml.Device, object string) error {
		return s.setMIGModeOn(handle, object, uuid, on)
	})
}

func (s *Session) setMIGModeOn(handle gonvml.Device, object string, uuid gpu.UUID, on bool) error {
	current, pending, ret := handle.GetMigMode()
	if err := wrap(ret, "nvmlDeviceGetMigMode", ""); err != nil {
		return err
	}
	if current != pending {
		return fmt.Errorf("%w: a change to %s is already pending; reset the GPU or reboot the node", ErrNotSwitchable, onOff(pending == gonvml.DEVICE_MIG_ENABLE))
	}
	want := gonvml.DEVICE_MIG_DISABLE
	if on {
		want = gonvml.DEVICE_MIG_ENABLE
	}
	if current == want {
		return nil
	}
	if err := s.noInstances(handle, uuid, object, current); err != nil {
		return err
	}
	can, err := switchable(handle, object)
	if err != nil {
		return err
	}
	if !can {
		return fmt.Errorf("%w: before Hopper this needs a GPU reset, and in a virtual machine the hypervisor controls it; an administrator can switch it with nvidia-smi -mig", ErrNotSwitchable)
	}
	s.noteMIGMode(uuid, current, want) // before links go down, and until they may be up again
	defer s.noteMIGModeNow(handle, uuid)
	return activate(handle, current, want)
}

// noteMIGModeNow stores the mode after an attempt to switch it; the last one if it can't be
// read.
func (s *Session) noteMIGModeNow(handle gonvml.Device, uuid gpu.UUID) {
	if current, pending, ret := handle.GetMigMode(); ret == gonvml.SUCCESS {
		s.noteMIGMode(uuid, current, pending)
	}
}

// noInstances returns ErrInUse if the GPU has instances.
func (s *Session) noInstances(handle gonvml.Device, uuid gpu.UUID, object string, current int) error {
	if current != gonvml.DEVICE_MIG_ENABLE {
		return nil
	}
	profiles, err := s.profilesOf(handle, uuid, object)
	if err != nil {
		return err
	}
	there, err := readInstances(handle, profiles, object)
	if err != nil {
		return err
	}
	if len(there) > 0 {
		return fmt.Errorf("%w: it has %d GPU instances, the first %s at %d", ErrInUse, len(there), there[0].Profile, there[0].Placement.Start)
	}
	return nil
}

// activate switches the mode, checks the driver's result, and reads the mode
// back.
func activate(handle gonvml.Device, current, want int) error {
	activation, ret := handle.SetMigMode(want)
	if err := wrap(ret, "nvmlDeviceSetMigMode", ""); err != nil {
		return usedBy(err, handle)
	}
	if err := wrap(activation, "nvmlDeviceSetMigMode: activation", ""); err != nil {
		return errors.Join(usedBy(err, handle), takeBack(handle, current))
	}
	current, pending, ret := handle.GetMigMode()
	if err := wrap(ret, "nvmlDeviceGetMigMode", ""); err != nil {
		return err
	}
	if current != want || pending != want {
		return fmt.Errorf("the driver reported success, but the mode is %s and %s is pending: reset the GPU or reboot the node", onOff(current == gonvml.DEVICE_MIG_ENABLE), onOff(pending == gonvml.DEVICE_MIG_ENABLE))
	}
	return nil
}

// takeBack sets the pending mode to the current one.
func takeBack(handle gonvml.Device, current int) error {
	_, ret := handle.SetMigMode(current)
	return wrap(ret, "reset the pending mode: nvmlDeviceSetMigMode", "")
}
