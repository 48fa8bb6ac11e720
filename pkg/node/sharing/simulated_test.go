package sharing_test

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

// TestOverNVML sets compute modes through the port of production, on a simulated
// machine whose GPUs fail now and then.
func TestOverNVML(t *testing.T) {
	for name, fault := range map[string]*nvmlsim.Fault{
		"nothing fails":     nil,
		"reading fails":     {Call: "DeviceGetComputeMode", Code: nvmlsim.Unknown},
		"setting fails":     {Call: "DeviceSetComputeMode", Code: nvmlsim.NoPermission},
		"no compute modes":  {Call: "DeviceGetComputeMode", Code: nvmlsim.NotSupported},
		"GPU lost for once": {Call: "DeviceGetComputeMode", Code: nvmlsim.GPUIsLost},
	} {
		t.Run(name, func(t *testing.T) {
			sim := nvmltest.NewSimulated(t, "1xh200")
			gpus, err := sim.GPUs()
			if err != nil {
				t.Fatal(err)
			}
			uuid := gpus[0].UUID
			m := newMachine()
			m.exclusive = false // it has no part in that here
			n := startWith(t, m, t.TempDir(), "boot-1", sharing.Options{ExclusiveProcess: true})
			n.SetHardware(sim, nil)
			r := n.hold(t, claim("a", journal.Grant{Device: "gpu-x-mps", GPU: uuid, Share: &journal.Part{}, MPS: &journal.MPS{MemoryMiB: 1}}))
			if fault != nil {
				fault.GPU, fault.Count = nvmlsim.AnyGPU, 1
				if err := sim.Machine.Fault(*fault); err != nil {
					t.Fatal(err)
				}
				_, err := n.Join(t.Context(), r, nil)
				if unsupported := fault.Code == nvmlsim.NotSupported; unsupported != (err == nil) {
					t.Errorf("join: got %v", err)
				}
			}
			n.prepare(t, r)
			if mode, err := sim.ComputeMode(uuid); mode != nvml.ComputeExclusiveProcess || err != nil {
				t.Errorf("mode: %s, %v", mode, err)
			}
			n.unprepare(t, "a")
			if mode, err := sim.ComputeMode(uuid); mode != nvml.ComputeDefault || err != nil {
				t.Errorf("mode afterwards: %s, %v", mode, err)
			}
		})
	}
}
