package nvml_test

import (
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/pkg/nvml/nvmltest"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/driverroot"
	"github.com/tessera-dra/tessera/sim/nvmlsim/library"
)

var libraryFile = flag.String("nvml.library", "", "run the contract on this library, a real GPU's, instead of on the simulator's")

func TestContract(t *testing.T) {
	if *libraryFile != "" {
		contract(t, *libraryFile)
		return
	}
	built := t.TempDir()
	build(t, built)
	for _, machine := range machines(t) {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			again(t, install(t, built, machine))
		})
	}
}

// again runs the contract in a separate process: go-nvml binds to the first
// library that a process loads, and ignores later paths.
func again(t *testing.T, path string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestContract$", "-test.v", "-nvml.library", path).CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// build builds the simulator's library and program into a directory.
func build(t testing.TB, dir string) {
	t.Helper()
	if err := library.Build(t.Context(), filepath.Join(dir, library.Name)); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), "go", "build", "-o", dir+"/nvmlsim", "../../sim/cmd/nvmlsim")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
}

// install installs a simulated machine and returns the path of its library.
func install(t testing.TB, built, machine string) string {
	t.Helper()
	spec, err := nvmlsim.ParseSpec([]byte(machine))
	if err != nil {
		t.Fatal(err)
	}
	d, err := nvmlsim.Describe(spec, "contract")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	err = driverroot.Install(driverroot.Options{Root: root, Machine: d, SMI: built + "/nvmlsim", Library: built + "/libnvidia-ml.so.1"})
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")
}

func contract(t *testing.T, path string) {
	s, err := nvml.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	nvmltest.Contract(t, s)
	t.Run("performance counters", func(t *testing.T) {
		lib := gonvml.New(gonvml.WithLibraryPath(path)) // the session's library, without the session
		if ret := lib.Init(); ret != gonvml.SUCCESS {
			t.Fatal(ret)
		}
		defer lib.Shutdown()
		nvmltest.PerformanceCounters(t, lib)
	})
	t.Run("changes", func(t *testing.T) {
		machine, err := nvmlsim.Open(filepath.Join(filepath.Dir(path), "../../..", nvmlsim.StateFile))
		if errors.Is(err, nvmlsim.ErrNoState) {
			t.Skipf("%s is a real GPU's: what comes now would change it", path)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer machine.Close()
		nvmltest.NVLinks(t, s, machine)
		nvmltest.Vitals(t, s, machine)
		nvmltest.Usage(t, s, machine)
		if machine.Description().Virtualization != "" { // one machine is enough: to stop waiting takes a second
			nvmltest.Events(t, s, machine)
		}
		nvmltest.ComputeModes(t, s, machine)
		nvmltest.MIGPairs(t, s, machine)
		nvmltest.MIGLifecycle(t, s, machine)
	})
}

// TestContractInProcess runs the contract where the race detector sees it. The possible pairs
// of partitions are only tested through the library: that takes long, and the hardware is
// the same.
func TestContractInProcess(t *testing.T) {
	for _, machine := range machines(t) {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			s := nvmltest.NewSimulated(t, machine)
			nvmltest.Contract(t, s)
			nvmltest.NVLinks(t, s, s.Machine)
			nvmltest.Vitals(t, s, s.Machine)
			nvmltest.Usage(t, s, s.Machine)
			nvmltest.ComputeModes(t, s, s.Machine)
			nvmltest.MIGLifecycle(t, s, s.Machine)
		})
	}
}

// TestPartitionUsage checks what is told of a GPU in MIG mode.
func TestPartitionUsage(t *testing.T) {
	for model, counters := range map[string]bool{"h100-80gb": true, "a100-40gb": false} {
		t.Run(model, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := nvmltest.NewSimulated(t, "{gpus: [{model: "+model+", migEnabled: true}]}")
				nvmltest.PartitionUsage(t, s.Machine, counters)
			})
		})
	}
}

// machines returns one machine with two GPUs for every model that is offered, and a
// virtual machine. Integrated GPUs, whose UUIDs have no prefix, aren't: TestIntegratedGPUs.
func machines(t *testing.T) []string {
	models, err := nvmlsim.Models()
	if err != nil {
		t.Fatal(err)
	}
	all := []string{"{virtualization: passthrough, gpus: [{model: h200}]}"}
	for _, m := range models {
		if !m.BareUUID {
			all = append(all, "2x"+m.ID)
		}
	}
	return all
}

// TestKilledBetweenTheTwo checks that the next process finds and destroys a GPU
// instance whose creator died before it created the compute instance.
func TestKilledBetweenTheTwo(t *testing.T) {
	if os.Getenv(nvmlsim.StateEnv) != "" {
		m, err := nvmlsim.Open(os.Getenv(nvmlsim.StateEnv))
		if err != nil {
			t.Fatal(err)
		}
		_, err = nvmltest.OpenSimulated(m).CreateInstance(first(t, nvmltest.OpenSimulated(m)))
		t.Fatalf("the test lets this process not come to here: %v", err)
	}
	s := nvmltest.NewSimulated(t, "{gpus: [{model: h200, migEnabled: true}]}")
	const forever = 1 << 30
	if err := s.Machine.Fault(nvmlsim.Fault{Call: "GpuInstanceCreateComputeInstance", GPU: nvmlsim.AnyGPU, DelayMS: forever}); err != nil {
		t.Fatal(err)
	}
	set, err := s.Machine.NewEventSet()
	if err != nil {
		t.Fatal(err)
	}
	defer set.Close()
	if err := set.Register(s.Machine.GPUs()[0], nvmlsim.MIGConfigChange); err != nil {
		t.Fatal(err)
	}
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestKilledBetweenTheTwo$")
	child.Env = append(os.Environ(), nvmlsim.StateEnv+"="+s.Machine.StatePath())
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	_, waitErr := set.Wait(t.Context(), time.Minute) // the GPU instance exists
	if err := errors.Join(waitErr, child.Process.Kill()); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // it was killed
	p := first(t, s)
	m, err := s.MIG(p.GPU)
	if err != nil {
		t.Fatal(err)
	}
	want := gpu.Instance{Profile: p.Profile, Placement: p.Placement, GPUInstanceID: 7, ComputeInstanceID: gpu.NoComputeInstance}
	if diff := cmp.Diff([]gpu.Instance{want}, m.Instances); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := s.DestroyInstance(p.GPU, want); err != nil {
		t.Error(err)
	}
}

// first returns the first partition that a machine can have.
func first(t *testing.T, s *nvmltest.Simulated) gpu.Partition {
	t.Helper()
	gpus, err := s.GPUs()
	if err != nil {
		t.Fatal(err)
	}
	p := gpus[0].MIG.Profiles[0]
	return gpu.Partition{GPU: gpus[0].UUID, Profile: p.Name, Placement: p.Placements[0]}
}

// TestPartitionsHaveAllMultiprocessors checks that the compute instance of each profile has
// all multiprocessors of its GPU instance. Profiles of one slice with double memory have
// a second, smaller compute instance profile of one slice.
func TestPartitionsHaveAllMultiprocessors(t *testing.T) {
	models, err := nvmlsim.Models()
	if err != nil {
		t.Fatal(err)
	}
	for _, model := range models {
		if model.MIG == nil {
			continue
		}
		machine := "{gpus: [{model: " + model.ID + ", migEnabled: true}]}"
		s := nvmltest.NewSimulated(t, machine)
		gpus, err := s.GPUs()
		if err != nil {
			t.Fatal(err)
		}
		for _, profile := range gpus[0].MIG.Profiles {
			made, err := s.CreateInstance(gpu.Partition{GPU: gpus[0].UUID, Profile: profile.Name, Placement: profile.Placements[0]})
			if err != nil {
				t.Fatalf("%s, %s: %v", machine, profile.Name, err)
			}
			devices, err := s.Machine.GPUs()[0].MIGDevices()
			if err != nil || len(devices) != 1 {
				t.Fatalf("%s, %s: MIG devices %v, error %v", machine, profile.Name, devices, err)
			}
			parent, compute, err := devices[0].Attributes()
			if err != nil || compute.MultiprocessorCount != parent.MultiprocessorCount {
				t.Errorf("%s, %s: compute instance with %d of %d multiprocessors, error %v",
					machine, profile.Name, compute.MultiprocessorCount, parent.MultiprocessorCount, err)
			}
			if err := s.DestroyInstance(gpus[0].UUID, made); err != nil {
				t.Fatal(err)
			}
		}
	}
}
