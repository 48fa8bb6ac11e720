// Package nodetest installs simulated drivers for the tests of the packages
// under node. Only tests import it.
package nodetest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/driverroot"
	"github.com/tessera-dra/tessera/sim/nvmlsim/library"
)

// Driver is a simulated driver on a fake host.
type Driver struct {
	// Host is the root directory of the fake host; Root is the driver root in it.
	Host, Root string
	// Machine that was installed.
	Machine nvmlsim.Description
}

// Run builds the simulator's library, installs a machine ("8xh100-80gb") on a
// fake host as a driver container would, runs the tests of a package with it,
// and returns the exit status. A process can have only one machine, because it
// loads the library. Needs root (device nodes).
func Run(m *testing.M, machine string, use func(Driver)) int {
	dir, err := os.MkdirTemp("", "tessera-driver-")
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	built, err := Build(dir)
	if err != nil {
		return fail(err)
	}
	d, err := Install(dir, built, machine, "node-0")
	if err != nil {
		return fail(err)
	}
	use(d)
	return m.Run()
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "simulated driver:", err)
	return 1
}

// program is the file beside the library that is installed as nvidia-smi.
const program = "nvmlsim"

// Build builds the simulator's library, and its program beside it, in a directory
// under dir.
func Build(dir string) (string, error) {
	file := filepath.Join(dir, "build", library.Name)
	if err := library.Build(context.Background(), file); err != nil {
		return "", err
	}
	build := exec.Command("go", "build", "-o", filepath.Join(filepath.Dir(file), program), "github.com/tessera-dra/tessera/sim/cmd/nvmlsim")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // it runs with the fake host as its root
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the program: %w\n%s", err, out)
	}
	return file, nil
}

// Install installs a machine on a fake host. Machines with the same name have
// the same GPUs. built is the library from Build.
func Install(host, built, machine, name string) (Driver, error) {
	d := Driver{Host: host, Root: "/run/nvidia/driver"}
	spec, err := nvmlsim.ParseSpec([]byte(machine))
	if err != nil {
		return d, err
	}
	if d.Machine, err = nvmlsim.Describe(spec, name); err != nil {
		return d, err
	}
	smi := filepath.Join(filepath.Dir(built), program)
	return d, driverroot.Install(driverroot.Options{Root: filepath.Join(host, d.Root), Machine: d.Machine, Library: built, SMI: smi})
}

// Hardware opens the machine, to change its hardware.
func (d Driver) Hardware() (*nvmlsim.Machine, error) {
	return nvmlsim.Open(filepath.Join(d.Host, d.Root, nvmlsim.StateFile))
}

// Names returns the names of the machine's whole GPUs, in the machine's order.
func (d Driver) Names() []gpu.DeviceName {
	var gpus []gpu.GPU
	for _, g := range d.Machine.GPUs {
		gpus = append(gpus, gpu.GPU{UUID: gpu.UUID(g.UUID)})
	}
	all, err := gpu.NewNames(gpus)
	if err != nil {
		panic(err) // the simulator's UUIDs differ
	}
	var names []gpu.DeviceName
	for _, g := range gpus {
		name, _ := all.Name(gpu.Whole{GPU: g.UUID})
		names = append(names, name)
	}
	return names
}
