package nvmltest

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// usageOver is the time over which the utilization by processes is read.
const usageOver = 5 * time.Second

// checkUsage checks that a GPU's usage is possible, and agrees with its other facts.
func checkUsage(t *testing.T, port Port, g gpu.GPU) {
	u, err := port.Usage(g.UUID, usageOver)
	must(t, err)
	t.Logf("%s: usage %+v", g.Model.ProductName, u)
	if u.Memory.Total != g.MemoryBytes || u.Memory.Used < 0 || u.Memory.Used > u.Memory.Total {
		t.Errorf("memory %+v of a GPU with %d bytes", u.Memory, g.MemoryBytes)
	}
	mig := g.MIG != nil && g.MIG.Enabled
	if known := u.Utilization != nil; known == mig {
		t.Errorf("utilization known: %t, MIG mode on: %t; want one of the two", known, mig)
	}
	if n := u.Utilization; n != nil && (*n < 0 || *n > 1) {
		t.Errorf("utilization %v, want 0 to 1", *n)
	}
	if u.Processes == nil {
		t.Error("the processes are unknown")
	}
	for _, p := range u.Processes {
		if p.PID <= 0 || p.MemoryBytes != nil && g.MemoryBytes > 0 && *p.MemoryBytes > g.MemoryBytes {
			t.Errorf("process %+v", p)
		}
	}
	instances := map[gpu.UUID]bool{}
	if g.MIG != nil {
		for _, i := range g.MIG.Instances {
			instances[i.UUID] = i.UUID != ""
		}
	}
	for _, p := range u.Partitions {
		if !instances[p.UUID] || p.Memory.Used < 0 || p.Memory.Used > p.Memory.Total || p.Memory.Total > g.MemoryBytes {
			t.Errorf("partition %+v of %v", p, instances)
		}
	}
}

// Usage checks that the port reports the usage by the simulated processes of the first GPU
// and, in MIG mode, of a partition.
func Usage(t *testing.T, port Port, machine *nvmlsim.Machine) {
	gpus, err := port.GPUs()
	must(t, err)
	const mib = 1 << 20
	whole := func(p nvmlsim.Process) nvmlsim.Process {
		p.GPUInstance, p.ComputeInstance = nvmlsim.NoInstance, nvmlsim.NoInstance
		return p
	}
	must(t, machine.AddProcess(0, whole(nvmlsim.Process{PID: 71, UsedMemory: 300 * mib, Utilization: 40})))
	must(t, machine.AddProcess(0, whole(nvmlsim.Process{PID: 72, UsedMemory: 200 * mib, Utilization: 35, MPSClient: true})))
	must(t, machine.AddProcess(0, whole(nvmlsim.Process{PID: 73, UsedMemory: 100 * mib, Name: nvmlsim.MPSServerName})))
	defer func() {
		must(t, errors.Join(machine.RemoveProcess(0, 71), machine.RemoveProcess(0, 72), machine.RemoveProcess(0, 73)))
	}()
	got, err := port.Usage(gpus[0].UUID, usageOver)
	must(t, err)
	want := gpu.Usage{
		Memory:      gpu.MemoryUsage{Total: gpus[0].MemoryBytes, Used: 600 * mib},
		Utilization: new(0.75),
		Processes: []gpu.Process{
			{PID: 71, MemoryBytes: new(int64(300 * mib)), Utilization: new(0.4)},
			{PID: 72, MemoryBytes: new(int64(200 * mib)), Utilization: new(0.0), MPSClient: true},
			{PID: 73, MemoryBytes: new(int64(100 * mib)), Utilization: new(0.35)}, // the client's, as on real GPUs
		},
	}
	if gpus[0].MemoryBytes == 0 { // it uses the computer's, of which NVML tells nothing
		want.Memory = gpu.MemoryUsage{}
	}
	if g := gpus[0]; g.MIG != nil && g.MIG.Enabled { // then the driver reports no utilization
		want.Utilization = nil
		for i := range want.Processes {
			want.Processes[i].Utilization = nil
		}
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(0, 1e-9)); diff != "" {
		t.Errorf("usage with three processes (-want +got):\n%s", diff)
	}
	must(t, machine.Fault(nvmlsim.Fault{Call: "DeviceGetProcessUtilization", GPU: 0, Code: nvmlsim.NotSupported}))
	got, err = port.Usage(gpus[0].UUID, usageOver)
	must(t, errors.Join(err, machine.ClearFaults()))
	for _, p := range got.Processes {
		if p.Utilization != nil {
			t.Errorf("a driver that doesn't tell the utilization of processes told %v of process %d", *p.Utilization, p.PID)
		}
	}
	usageLost(t, port, machine, gpus[0].UUID)
}

// usageLost checks that a GPU that falls off the bus at any of the calls gives no usage.
func usageLost(t *testing.T, port Port, machine *nvmlsim.Machine, uuid gpu.UUID) {
	for _, call := range []string{
		"DeviceGetMemoryInfo", "DeviceGetUtilizationRates", "DeviceGetComputeRunningProcesses",
		"DeviceGetMPSComputeRunningProcesses", "DeviceGetProcessUtilization",
	} {
		must(t, machine.Fault(nvmlsim.Fault{Call: call, GPU: 0, Code: nvmlsim.GPUIsLost}))
		_, err := port.Usage(uuid, usageOver)
		want(t, "usage of a GPU that is lost at "+call, err, nvml.ErrLost)
		must(t, machine.ClearFaults())
	}
}
