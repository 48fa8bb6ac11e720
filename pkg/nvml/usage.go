package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// memoryNotAvailable is NVML_VALUE_NOT_AVAILABLE in the memory of a process.
const memoryNotAvailable = math.MaxUint64

// Usage reads how much of a GPU programs use; the utilization of processes is that of
// the last time over, and that of partitions of the time since the last call, which needs
// calls at about that interval. A value that the driver doesn't have stays unknown. Without root,
// the driver doesn't tell the processes of MIG devices. It returns ErrLost if the GPU
// doesn't answer or isn't listed, and ErrNotResponding.
func (s *Session) Usage(uuid gpu.UUID, over time.Duration) (gpu.Usage, error) {
	return onGPU(s, uuid, reads, "read its usage", s.limits.read, func(handle gonvml.Device, object string) (gpu.Usage, error) {
		return s.readUsage(handle, uuid, over, object)
	})
}

func (s *Session) readUsage(handle gonvml.Device, uuid gpu.UUID, over time.Duration, object string) (u gpu.Usage, err error) {
	if u.Memory, err = s.readMemory(handle, object); err != nil && !errors.Is(err, ErrNotSupported) {
		return gpu.Usage{}, err
	}
	rates, ret := handle.GetUtilizationRates()
	if u.Utilization, err = orUnknown(percent(rates.Gpu), ret, "nvmlDeviceGetUtilizationRates", object); err != nil {
		return gpu.Usage{}, err
	}
	if u.Processes, err = readProcesses(handle, object); err != nil {
		return gpu.Usage{}, err
	}
	if err = addUtilization(u.Processes, handle, time.Now().Add(-over), object); err != nil {
		return gpu.Usage{}, err
	}
	u.Partitions, err = s.readPartitions(handle, uuid, over, object)
	return u, err
}

func percent(n uint32) float64 { return float64(min(n, 100)) / 100 }

// readMemory reads the memory of a GPU or a MIG device. Before R510, drivers count what
// they reserve as used.
func (s *Session) readMemory(handle gonvml.Device, object string) (gpu.MemoryUsage, error) {
	if s.has[callMemoryInfo] {
		memory, ret := handle.GetMemoryInfo_v2()
		if ret != gonvml.ERROR_NOT_SUPPORTED {
			return gpu.MemoryUsage{Total: int64(memory.Total), Used: int64(memory.Used)}, wrap(ret, callMemoryInfo, object)
		}
	}
	memory, ret := handle.GetMemoryInfo()
	return gpu.MemoryUsage{Total: int64(memory.Total), Used: int64(memory.Used)}, wrap(ret, "nvmlDeviceGetMemoryInfo", object)
}

// readProcesses lists the processes of a GPU and of its MIG devices, by PID. Clients of
// MPS are in a list of their own.
func readProcesses(handle gonvml.Device, object string) ([]gpu.Process, error) {
	direct, ret := handle.GetComputeRunningProcesses()
	if known, err := orUnknown(direct, ret, "nvmlDeviceGetComputeRunningProcesses", object); known == nil {
		return nil, err
	}
	clients, ret := handle.GetMPSComputeRunningProcesses()
	if _, err := orUnknown(clients, ret, "nvmlDeviceGetMPSComputeRunningProcesses", object); err != nil {
		return nil, err
	}
	all := make([]gpu.Process, 0, len(direct)+len(clients))
	for _, p := range clients {
		all = append(all, newProcess(p, true))
	}
	for _, p := range direct {
		all = append(all, newProcess(p, false))
	}
	slices.SortStableFunc(all, func(a, b gpu.Process) int { return cmp.Compare(a.PID, b.PID) })
	// One that is in both lists is one process.
	return slices.CompactFunc(all, func(a, b gpu.Process) bool {
		return a.PID == b.PID && equal(a.GPUInstanceID, b.GPUInstanceID) && equal(a.ComputeInstanceID, b.ComputeInstanceID)
	}), nil
}

func newProcess(p gonvml.ProcessInfo, mps bool) gpu.Process {
	made := gpu.Process{PID: int(p.Pid), GPUInstanceID: instanceID(p.GpuInstanceId), ComputeInstanceID: instanceID(p.ComputeInstanceId), MPSClient: mps}
	if p.UsedGpuMemory != memoryNotAvailable {
		used := int64(p.UsedGpuMemory)
		made.MemoryBytes = &used
	}
	return made
}

func equal(a, b *int) bool { return a == b || a != nil && b != nil && *a == *b }

// addUtilization reads the utilization of the processes since a time. NVML has entries
// only for processes that ran.
func addUtilization(processes []gpu.Process, handle gonvml.Device, since time.Time, object string) error {
	samples, ret := processUtilization(handle, uint64(since.UnixMicro())) //nolint:forbidigo // NVML stamps its samples with the time of day
	if ret == gonvml.ERROR_NOT_FOUND {
		ret = gonvml.SUCCESS
	}
	known, err := orUnknown(samples, ret, "nvmlDeviceGetProcessUtilization", object)
	if known == nil {
		return err
	}
	newest := map[int]gonvml.ProcessUtilizationSample{}
	for _, sample := range samples {
		if pid := int(sample.Pid); sample.TimeStamp >= newest[pid].TimeStamp {
			newest[pid] = sample
		}
	}
	for i := range processes {
		u := percent(newest[processes[i].PID].SmUtil)
		processes[i].Utilization = &u
	}
	return nil
}

// processUtilization calls go-nvml, which panics if there are more samples when it reads
// them than when it asked how many there are.
func processUtilization(handle gonvml.Device, since uint64) (samples []gonvml.ProcessUtilizationSample, ret gonvml.Return) {
	defer func() {
		if recover() != nil {
			samples, ret = nil, gonvml.ERROR_INSUFFICIENT_SIZE
		}
	}()
	samples, ret = handle.GetProcessUtilization(since)
	if ret == gonvml.ERROR_INSUFFICIENT_SIZE && len(samples) == 0 {
		ret = gonvml.SUCCESS // go-nvml's answer where there are none
	}
	return samples, ret
}

// readPartitions reads the memory and the utilization of each MIG device.
func (s *Session) readPartitions(handle gonvml.Device, uuid gpu.UUID, over time.Duration, object string) ([]gpu.PartitionUsage, error) {
	current, _, ret := handle.GetMigMode()
	if ret != gonvml.SUCCESS || current != gonvml.DEVICE_MIG_ENABLE {
		return nil, nil //nolint:nilerr // a GPU that can't be divided, or isn't
	}
	devices, err := readMIGDevices(handle, object)
	if errors.Is(err, ErrNotSupported) { // the mode was switched off in the meantime, or a guest can't see instances
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	used, err := s.readInstanceUtilization(handle, uuid, devices, over, object)
	if err != nil {
		return nil, err
	}
	var all []gpu.PartitionUsage
	for id, some := range devices {
		for _, d := range some {
			memory, err := s.readMemory(d.handle, fmt.Sprintf("of MIG device %s", d.uuid))
			if errors.Is(err, ErrLost) {
				return nil, err
			}
			if err != nil {
				continue // destroyed in the meantime
			}
			p := gpu.PartitionUsage{UUID: d.uuid, GPUInstanceID: id, ComputeInstanceID: d.computeID, Memory: memory}
			if u, known := used[id]; known {
				p.Utilization = &u
			}
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b gpu.PartitionUsage) int {
		return cmp.Or(cmp.Compare(a.GPUInstanceID, b.GPUInstanceID), cmp.Compare(a.ComputeInstanceID, b.ComputeInstanceID))
	})
	return all, nil
}
