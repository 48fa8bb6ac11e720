// Command nvmlsim makes simulated NVIDIA machines: it lays out a driver root
// that production programs run on unmodified (install, uninstall), shows and
// changes the machine there (state, fault, latency, process, lose, xid, reboot,
// driver, mps), lists what GPUs there are (models), and is a program that uses
// one (cuda). Called as nvidia-smi, nvidia-modprobe, nvidia-cuda-mps-control or
// nvidia-cuda-mps-server it is the stand-in that install puts into the driver
// root under that name; the library there starts nvidia-smi as its engine.
//
// Build it static (CGO_ENABLED=0 go build ./cmd/nvmlsim), so that they work in
// any container image, and the library beside it (go run ./cmd/nvmlsim/lib FILE).
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
	"github.com/tessera-dra/tessera/pkg/nvmlsim/driverroot"
	"github.com/tessera-dra/tessera/pkg/nvmlsim/engine"
	"github.com/tessera-dra/tessera/pkg/nvmlsim/mps"
	"github.com/tessera-dra/tessera/pkg/nvmlsim/smi"
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

// openOwn opens the machine that this very file belongs to.
func openOwn() (*nvmlsim.Machine, error) {
	return nvmlsim.OpenInstalled(ownPath())
}

// ownPath is this very file.
func ownPath() string {
	exe, err := os.Executable()
	if err == nil {
		return exe
	}
	// Chrooted into a driver root there is no real /proc.
	if exe, err = exec.LookPath(os.Args[0]); err != nil {
		return os.Args[0]
	}
	return exe
}
