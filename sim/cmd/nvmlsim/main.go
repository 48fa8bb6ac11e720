// Command nvmlsim simulates NVIDIA machines: it installs a driver root for
// unmodified production programs (install, uninstall), shows and changes the
// machine there (state, break, heal, reset, fault, latency, process, reboot,
// driver, mps), lists the GPU models (models), and runs a simulated CUDA program
// (cuda). install copies it into the driver root as nvidia-smi,
// nvidia-modprobe, nvidia-cuda-mps-control and nvidia-cuda-mps-server; under
// these names it simulates those programs. The library there starts nvidia-smi
// as its engine.
//
// Build it static (CGO_ENABLED=0 go build ./sim/cmd/nvmlsim), so that they work in
// any container image, and the library beside it (go run ./sim/cmd/nvmlsim/lib FILE).
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/sim/nvmlsim/driverroot"
	"github.com/tessera-dra/tessera/sim/nvmlsim/engine"
	"github.com/tessera-dra/tessera/sim/nvmlsim/mps"
	"github.com/tessera-dra/tessera/sim/nvmlsim/smi"
)

func main() {
	switch filepath.Base(os.Args[0]) {
	case "nvidia-smi":
		os.Exit(smi.Run(os.Args[1:], os.Stdout, openOwn))
	case "nvidia-cuda-mps-control":
		os.Exit(mps.RunControl(ownPath(), os.Args[1:], os.Stdin, os.Stdout, openOwn))
	case "nvidia-cuda-mps-server":
		os.Exit(mps.RunServer(openOwn))
	case "nvidia-modprobe":
		os.Exit(driverroot.Modprobe(ownPath(), os.Args[1:]))
	case engine.ProgramName:
		os.Exit(engine.Run(os.Args[1]))
	}
	if err := newCommand().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "nvmlsim:", err)
		os.Exit(1)
	}
}

// openOwn opens the machine of this program's file.
func openOwn() (*nvmlsim.Machine, error) {
	return nvmlsim.OpenInstalled(ownPath())
}

// ownPath returns the path of this program's file.
func ownPath() string {
	exe, err := os.Executable()
	if err == nil {
		return exe
	}
	// In a chroot into a driver root there is no real /proc.
	if exe, err = exec.LookPath(os.Args[0]); err != nil {
		return os.Args[0]
	}
	return exe
}
