// Package nodetest lays out simulated drivers for the tests of the packages
// under node. Only tests import it.
package nodetest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
	"github.com/tessera-dra/tessera/pkg/nvmlsim/driverroot"
)

// Driver is a simulated driver on a pretended host.
type Driver struct {
	// Host is the directory that stands for the host's file system; Root is
	// the driver root in it.
	Host, Root string
	// Machine that was installed.
	Machine nvmlsim.Description
}

// Run builds the simulator's library, installs a machine ("8xh100-80gb") on a
// pretended host as a driver container would, runs the tests of a package with
// it, and returns the exit status. One machine a process: the library is
// loaded into it. Needs root (device nodes).
func Run(m *testing.M, machine string, use func(Driver)) int {
	dir, err := os.MkdirTemp("", "tessera-driver-")
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	d := Driver{Host: dir, Root: "/run/nvidia/driver"}
	if d.Machine, err = install(dir, d.Root, machine); err != nil {
		return fail(err)
	}
	use(d)
	return m.Run()
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "simulated driver:", err)
	return 1
}

func install(host, root, machine string) (nvmlsim.Description, error) {
	spec, err := nvmlsim.ParseSpec([]byte(machine))
	if err != nil {
		return nvmlsim.Description{}, err
	}
	d, err := nvmlsim.Describe(spec, "node-0")
	if err != nil {
		return d, err
	}
	library := filepath.Join(host, "build", "libnvidia-ml.so.1")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-o", library, "github.com/tessera-dra/tessera/cmd/nvmlsim/lib")
	if out, err := build.CombinedOutput(); err != nil {
		return d, fmt.Errorf("build the library: %w\n%s", err, out)
	}
	smi, err := os.Executable() // nobody runs it here
	if err != nil {
		return d, err
	}
	return d, driverroot.Install(driverroot.Options{Root: filepath.Join(host, root), Machine: d, Library: library, SMI: smi})
}
