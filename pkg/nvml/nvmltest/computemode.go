package nvmltest

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// ComputeModes sets each mode on each GPU of a simulated machine and leaves them
// as they were. It isn't for real hardware, where others would notice.
func ComputeModes(t *testing.T, port interface {
	Port
	MIGPort
	SetComputeMode(uuid gpu.UUID, mode nvml.ComputeMode) error
}, machine *nvmlsim.Machine,
) {
	gpus, err := port.GPUs()
	must(t, err)
	for i, g := range gpus {
		before, err := port.ComputeMode(g.UUID)
		must(t, err)
		for _, mode := range []nvml.ComputeMode{nvml.ComputeExclusiveProcess, nvml.ComputeExclusiveProcess, nvml.ComputeProhibited, nvml.ComputeDefault, before} {
			must(t, port.SetComputeMode(g.UUID, mode))
			got, err := port.ComputeMode(g.UUID)
			must(t, err)
			if got != mode {
				t.Errorf("GPU %d: the mode is %s, want %s", i, got, mode)
			}
		}
		want(t, "the mode of old drivers", port.SetComputeMode(g.UUID, nvml.ComputeExclusiveThread), nvml.ErrNotSupported)
		want(t, "no mode", port.SetComputeMode(g.UUID, "x"), nvml.ErrNotSupported)
		if i == 0 && g.MIG != nil && g.MIG.Switchable {
			must(t, port.SetMIGMode(g.UUID, true))
			want(t, "compute mode in MIG mode", port.SetComputeMode(g.UUID, nvml.ComputeExclusiveProcess), nvml.ErrNotSupported)
			must(t, port.SetMIGMode(g.UUID, false))
		}
	}
	want(t, "compute mode of a GPU that isn't there", port.SetComputeMode(nowhere, nvml.ComputeDefault), nvml.ErrLost)
	must(t, machine.Fault(nvmlsim.Fault{Call: "DeviceSetComputeMode", GPU: nvmlsim.AnyGPU, Code: nvmlsim.NoPermission, Count: 1}))
	want(t, "compute mode as nobody", port.SetComputeMode(gpus[0].UUID, nvml.ComputeDefault), nvml.ErrNoPermission)
	must(t, machine.Fault(nvmlsim.Fault{Call: "DeviceGetComputeMode", GPU: nvmlsim.AnyGPU, Code: nvmlsim.NotSupported, Count: 1}))
	_, err = port.ComputeMode(gpus[0].UUID)
	want(t, "compute mode of a GPU without", err, nvml.ErrNotSupported)
}
