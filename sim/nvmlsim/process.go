package nvmlsim

import (
	"fmt"
	"slices"
)

// AddProcess makes a process use a GPU (by position), or a MIG device of it,
// whose instances must exist. It holds them, and the MIG mode, until it is
// removed or the machine reboots.
func (m *Machine) AddProcess(gpu int, p Process) error {
	return m.updateGPU(gpu, func(_ *State, g *GPUState) error {
		if p.PID == 0 {
			return fmt.Errorf("process: PID 0: %w", InvalidArgument)
		}
		if p.GPUInstance != NoInstance && !g.hasMIGDevice(p.GPUInstance, p.ComputeInstance) {
			return fmt.Errorf("process %d: GPU %d has no compute instance %d in a GPU instance %d: %w", p.PID, gpu, p.ComputeInstance, p.GPUInstance, NotFound)
		}
		if slices.ContainsFunc(g.Processes, func(q Process) bool {
			return q.PID == p.PID && q.GPUInstance == p.GPUInstance && q.ComputeInstance == p.ComputeInstance
		}) {
			return fmt.Errorf("process %d uses GPU %d already: %w", p.PID, gpu, InvalidArgument)
		}
		g.Processes = append(g.Processes, p)
		return nil
	})
}

// RemoveProcess ends a process on a GPU (by position). It returns NotFound if
// there is no such process.
func (m *Machine) RemoveProcess(gpu int, pid uint32) error {
	return m.updateGPU(gpu, func(_ *State, g *GPUState) error {
		n := len(g.Processes)
		g.Processes = slices.DeleteFunc(g.Processes, func(p Process) bool { return p.PID == pid })
		if len(g.Processes) == n {
			return fmt.Errorf("process %d doesn't use GPU %d: %w", pid, gpu, NotFound)
		}
		return nil
	})
}

func (s *GPUState) hasMIGDevice(gpuInstance, computeInstance uint32) bool {
	return slices.ContainsFunc(s.Instances, func(i GPUInstance) bool {
		return i.ID == gpuInstance && slices.ContainsFunc(i.Compute, func(c ComputeInstance) bool { return c.ID == computeInstance })
	})
}
