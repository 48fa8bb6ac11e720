// Command nvmlsim makes simulated NVIDIA machines: it lays out a driver root
// that production programs run on unmodified (install, uninstall), shows and
// changes the machine there (state, fault, latency, process, lose, xid, reboot,
// driver), and lists what GPUs there are (models). Called as nvidia-smi it is
// the stand-in that install puts into the driver root.
//
// Build it static (CGO_ENABLED=0 go build ./cmd/nvmlsim), so that nvidia-smi
// works in any container image, and the library beside it (see ./lib).
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
	"github.com/tessera-dra/tessera/pkg/nvmlsim/smi"
)

func main() {
	if filepath.Base(os.Args[0]) == "nvidia-smi" {
		os.Exit(smi.Run(os.Args[1:], os.Stdout, openOwn))
	}
	if err := newCommand().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "nvmlsim:", err)
		os.Exit(1)
	}
}

// openOwn opens the machine that this very file belongs to.
func openOwn() (*nvmlsim.Machine, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return nvmlsim.OpenInstalled(exe)
}
