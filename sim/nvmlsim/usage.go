package nvmlsim

import "slices"

// Processes returns the processes that compute on the GPU and its MIG devices now,
// except the clients of MPS servers.
func (g *GPU) Processes() ([]Process, error) {
	return g.processes("DeviceGetComputeRunningProcesses", false)
}

// MPSProcesses returns the clients of MPS servers that compute on the GPU and its MIG
// devices now.
func (g *GPU) MPSProcesses() ([]Process, error) {
	return g.processes("DeviceGetMPSComputeRunningProcesses", true)
}

func (g *GPU) processes(call string, mps bool) ([]Process, error) {
	return fromState(g, call, func(s GPUState) []Process { return ofKind(g.m.living(s.Processes), mps) })
}

func ofKind(all []Process, mps bool) []Process {
	return slices.DeleteFunc(slices.Clone(all), func(p Process) bool { return p.MPSClient != mps })
}

// AllProcesses returns Processes and MPSProcesses, as nvidia-smi lists them.
func (g *GPU) AllProcesses() []Process {
	direct, _ := g.Processes() // a GPU that doesn't answer has none
	clients, _ := g.MPSProcesses()
	return append(direct, clients...)
}

// Processes returns the processes that use the MIG device now, except the clients of MPS
// servers.
func (c Compute) Processes() ([]Process, error) {
	return c.processes("DeviceGetComputeRunningProcesses", false)
}

// MPSProcesses returns the clients of MPS servers that use the MIG device now.
func (c Compute) MPSProcesses() ([]Process, error) {
	return c.processes("DeviceGetMPSComputeRunningProcesses", true)
}

func (c Compute) processes(call string, mps bool) ([]Process, error) {
	if _, _, err := c.get(call); err != nil {
		return nil, err
	}
	all := ofKind(c.in.g.m.living(c.in.g.state().Processes), mps)
	return slices.DeleteFunc(all, func(p Process) bool { return p.GPUInstance != c.in.id || p.ComputeInstance != c.id }), nil
}

// MPSServerName is the name of an MPS server's process.
const MPSServerName = "nvidia-cuda-mps-server"

// Utilization is the percentage of the time in which the GPU computes. It returns
// NotSupported in MIG mode (nvml.h).
func (g *GPU) Utilization() (uint32, error) {
	const call = "DeviceGetUtilizationRates"
	if g.state().MIGCurrent {
		return 0, g.refuse(call)
	}
	return fromState(g, call, func(s GPUState) uint32 {
		sum := uint32(0)
		for _, p := range g.m.living(s.Processes) {
			sum += p.Utilization
		}
		return min(sum, 100)
	})
}

// ProcessUtilization returns the processes that have computed lately. It returns NotFound
// if there are none, and NotSupported in MIG mode (nvml.h). The utilization of MPS clients
// counts as their server's, as seen on an H200 with driver 580.
func (g *GPU) ProcessUtilization() ([]Process, error) {
	const call = "DeviceGetProcessUtilization"
	if g.state().MIGCurrent {
		return nil, g.refuse(call)
	}
	busy, err := fromState(g, call, func(s GPUState) []Process { return computing(g.m.living(s.Processes)) })
	if err == nil && len(busy) == 0 {
		return nil, NotFound
	}
	return busy, err
}

// computing returns the processes with a utilization.
func computing(all []Process) (busy []Process) {
	clients := uint32(0)
	for _, p := range all {
		if p.MPSClient {
			clients += p.Utilization
		}
	}
	for _, p := range all {
		if p.Name == MPSServerName {
			p.Utilization = min(clients, 100)
		}
		if p.Utilization > 0 && !p.MPSClient {
			busy = append(busy, p)
		}
	}
	return busy
}

// refuse returns the error of a call that the GPU doesn't have now.
func (g *GPU) refuse(call string) error {
	if err := g.call(call); err != nil {
		return err
	}
	return NotSupported
}
