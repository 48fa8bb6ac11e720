package nvmlsim

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// CUDADevice is a device of a CUDA program: a GPU, or a MIG device of a GPU in
// MIG mode.
type CUDADevice struct {
	GPU  *GPU
	UUID string
	// GPUInstance and ComputeInstance are NoInstance for a whole GPU.
	GPUInstance, ComputeInstance uint32
	Multiprocessors              uint32
	// Memory in bytes, without the memory that the driver reserves.
	Memory uint64
}

// PageFault makes the GPU report XID 31 for an illegal memory access of a
// process on the device.
func (d CUDADevice) PageFault(pid uint32, program string) error {
	x := XID{Code: 31, PID: pid, Name: filepath.Base(program)}
	if d.GPUInstance != NoInstance {
		x.GPUInstance, x.ComputeInstance = &d.GPUInstance, &d.ComputeInstance
	}
	return d.GPU.m.RaiseXID(d.GPU.pos, x)
}

// CUDADevices returns the devices that a CUDA program sees here, in its order.
// It sees only the first MIG device of a GPU in MIG mode. visible is
// CUDA_VISIBLE_DEVICES, nil if that isn't set: indexes, and UUIDs of GPUs and
// MIG devices or prefixes of them. All entries after the first unknown one are
// ignored.
func (m *Machine) CUDADevices(visible *string) []CUDADevice {
	var all, first []CUDADevice
	for _, g := range m.gpus {
		of := g.cudaDevices()
		if all = append(all, of...); len(of) > 0 {
			first = append(first, of[0])
		}
	}
	return SelectVisible(visible, first, all, func(d CUDADevice) string { return d.UUID })
}

// SelectVisible selects devices as CUDA_VISIBLE_DEVICES does (nil: not set):
// indexes refer to first, UUIDs to all.
func SelectVisible[T any](visible *string, first, all []T, uuid func(T) string) []T {
	if visible == nil {
		return first
	}
	var picked []T
	for name := range strings.SplitSeq(*visible, ",") {
		name = strings.TrimSpace(name)
		if i, err := strconv.Atoi(name); err == nil {
			if i < 0 || i >= len(first) {
				break
			}
			picked = append(picked, first[i])
			continue
		}
		at := slices.IndexFunc(all, func(d T) bool { return strings.HasPrefix(uuid(d), name) })
		if at < 0 || (!strings.HasPrefix(name, "GPU-") && !strings.HasPrefix(name, "MIG-")) {
			break
		}
		picked = append(picked, all[at])
	}
	return picked
}

func (g *GPU) cudaDevices() []CUDADevice {
	s := g.state()
	if s.Lost {
		return nil
	}
	if !s.MIGCurrent {
		return []CUDADevice{{
			GPU: g, UUID: g.id.UUID, GPUInstance: NoInstance, ComputeInstance: NoInstance,
			Multiprocessors: g.model.Engines.Multiprocessors, Memory: g.model.CUDABytes(),
		}}
	}
	var all []CUDADevice
	for _, c := range g.migDevices() {
		p, cp, err := c.Attributes()
		if err != nil {
			continue // destroyed in the meantime
		}
		all = append(all, CUDADevice{
			GPU: g, UUID: c.uuid(), GPUInstance: c.in.id, ComputeInstance: c.id,
			Multiprocessors: cp.MultiprocessorCount, Memory: p.MemorySizeMB << 20,
		})
	}
	return all
}

// Admits returns nil if another program may use this number of bytes of the
// device now, otherwise the errors InUse and Memory of Holder.Set.
func (d CUDADevice) Admits(memory uint64) error {
	return d.admits(d.GPU.state(), 0, memory)
}

func (d CUDADevice) admits(s GPUState, holder, memory uint64) error {
	const prohibited, exclusive = 2, 3
	others := d.GPU.m.living(s.Processes)
	if s.Lost {
		return GPUIsLost
	}
	whole := d.GPUInstance == NoInstance // MIG devices always have the default mode
	if whole && s.ComputeMode == prohibited {
		return InUse
	}
	if whole && s.ComputeMode == exclusive && slices.ContainsFunc(others, func(p Process) bool { return p.Holder == 0 || p.Holder != holder }) {
		return InUse
	}
	if memory > d.Memory-min(d.used(others), d.Memory) {
		return Memory
	}
	return nil
}

func (d CUDADevice) used(all []Process) uint64 {
	sum := uint64(0)
	for _, p := range all {
		if p.GPUInstance == d.GPUInstance {
			sum += p.UsedMemory
		}
	}
	return sum
}

// Free returns the number of unused bytes of the device.
func (d CUDADevice) Free() uint64 {
	return d.Memory - min(d.used(d.GPU.m.living(d.GPU.state().Processes)), d.Memory)
}
