package engine

import (
	"time"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

func (s *session) deviceGetUtilizationRates(h handle, out *nvmlUtilization) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	if out == nil {
		return nvmlsim.InvalidArgument
	}
	percent, err := g.Utilization()
	if err != nil {
		return code(err)
	}
	*out = nvmlUtilization{Gpu: percent}
	return ok
}

// deviceGetProcessUtilization has one sample of each process, as new as the call.
func (s *session) deviceGetProcessUtilization(h handle, utilization *room[nvmlProcessUtilizationSample], count *uint32, since uint64) nvmlsim.Return {
	g, err := s.gpu(h)
	if err != nil {
		return code(err)
	}
	now := uint64(time.Now().UnixMicro())
	return list(count, utilization, func() ([]nvmlsim.Process, error) {
		all, err := g.ProcessUtilization()
		if err == nil && since >= now {
			return nil, nvmlsim.NotFound
		}
		return all, err
	}, func(p nvmlsim.Process) nvmlProcessUtilizationSample {
		return nvmlProcessUtilizationSample{Pid: p.PID, TimeStamp: now, SmUtil: p.Utilization}
	})
}

func (s *session) deviceGetComputeRunningProcesses(h handle, count *uint32, infos *room[nvmlProcessInfoV1]) nvmlsim.Return {
	return processes(s, h, count, infos, direct, infoV1)
}

func (s *session) deviceGetComputeRunningProcessesV3(h handle, count *uint32, infos *room[nvmlProcessInfoV2]) nvmlsim.Return {
	return processes(s, h, count, infos, direct, infoV2)
}

func (s *session) deviceGetMPSComputeRunningProcesses(h handle, count *uint32, infos *room[nvmlProcessInfoV1]) nvmlsim.Return {
	return processes(s, h, count, infos, mpsClients, infoV1)
}

func (s *session) deviceGetMPSComputeRunningProcessesV3(h handle, count *uint32, infos *room[nvmlProcessInfoV2]) nvmlsim.Return {
	return processes(s, h, count, infos, mpsClients, infoV2)
}

func infoV1(p nvmlsim.Process) nvmlProcessInfoV1 {
	return nvmlProcessInfoV1{Pid: p.PID, UsedGpuMemory: p.UsedMemory}
}

func infoV2(p nvmlsim.Process) nvmlProcessInfoV2 {
	return nvmlProcessInfoV2{
		Pid: p.PID, UsedGpuMemory: p.UsedMemory,
		GpuInstanceId: p.GPUInstance, ComputeInstanceId: p.ComputeInstance,
	}
}

// lister is a GPU or a MIG device.
type lister interface {
	Processes() ([]nvmlsim.Process, error)
	MPSProcesses() ([]nvmlsim.Process, error)
}

func direct(l lister) ([]nvmlsim.Process, error)     { return l.Processes() }
func mpsClients(l lister) ([]nvmlsim.Process, error) { return l.MPSProcesses() }

func processes[T any](s *session, h handle, count *uint32, infos *room[T], get func(lister) ([]nvmlsim.Process, error), convert func(nvmlsim.Process) T) nvmlsim.Return {
	l, err := s.lister(h)
	if err != nil {
		return code(err)
	}
	return list(count, infos, func() ([]nvmlsim.Process, error) { return get(l) }, convert)
}

// list fills an array for count values. If it is too small, it answers with the count
// that there are.
func list[T any](count *uint32, into *room[T], get func() ([]nvmlsim.Process, error), convert func(nvmlsim.Process) T) nvmlsim.Return {
	if count == nil {
		return nvmlsim.InvalidArgument
	}
	all, err := get()
	if err != nil {
		return code(err)
	}
	fit := int(*count)
	*count = uint32(len(all))
	if fit < len(all) {
		return nvmlsim.InsufficientSize
	}
	if into == nil && len(all) > 0 {
		return nvmlsim.InvalidArgument
	}
	for _, p := range all {
		into.out = append(into.out, convert(p))
	}
	return ok
}

func (s *session) lister(h handle) (lister, error) {
	if c, ok := s.migDevice(h); ok {
		return c, nil
	}
	return s.gpu(h)
}

func (s *session) deviceGetGraphicsRunningProcessesV3(h handle, count *uint32, _ *room[nvmlProcessInfoV2]) nvmlsim.Return {
	l, err := s.lister(h)
	if err != nil {
		return code(err)
	}
	return put1(count, func() (int, error) {
		_, err := l.Processes()
		return 0, err
	})
}
