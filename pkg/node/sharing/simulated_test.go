package sharing_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/smi"
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
			n := startWith(t, m, t.TempDir(), "boot-1", sharing.Config{ExclusiveProcess: true})
			n.SetHardware(sim, nil)
			r := n.hold(t, claim("a", holding.Holding{Device: "gpu-x-mps", GPU: uuid, Share: &holding.Part{}, MPS: &holding.MPS{MemoryMiB: 1}}))
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

// TestTimeSlicesBeforeVolta: on a P100 the user reads that the length of a time
// slice can't be set, and the remedy.
func TestTimeSlicesBeforeVolta(t *testing.T) {
	sim := nvmltest.NewSimulated(t, "1xp100-16gb,1xrtx-2080-ti")
	run := func(_ context.Context, args ...string) (string, error) {
		var out bytes.Buffer
		code := smi.Run(args, &out, func() (*nvmlsim.Machine, error) { return nvmlsim.Open(sim.Machine.StatePath()) })
		if code != 0 {
			return out.String(), fmt.Errorf("exit status %d", code)
		}
		return out.String(), nil
	}
	gpus, err := sim.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sharing.ReadTimeSlice(t.Context(), run, gpus[0].UUID); err == nil || !strings.Contains(err.Error(), "can't be set on this GPU with this driver: ask for interval Default") {
		t.Errorf("%s: got %v, want what to ask for", gpus[0].Model.ProductName, err)
	}
	if got, err := sharing.ReadTimeSlice(t.Context(), run, gpus[1].UUID); got != "Default" || err != nil {
		t.Errorf("%s: got %q, %v, want Default", gpus[1].Model.ProductName, got, err)
	}
	if err := gpu.CheckMPS(gpus[0].Model); err == nil || !strings.Contains(err.Error(), "a Tesla P100-PCIE-16GB has 6.0") {
		t.Errorf("MPS on a P100: got %v, want a refusal", err)
	}
	if err := gpu.CheckMPS(gpus[1].Model); err != nil {
		t.Errorf("MPS on a 2080 Ti: %v", err)
	}
}
