package node

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

// nvidiaSMI runs the driver's nvidia-smi as the host would.
func nvidiaSMI(host driverroot.Host, root driverroot.Root) sharing.SMI {
	return func(ctx context.Context, args ...string) (string, error) {
		cmd, err := root.Command(ctx, host, "nvidia-smi", args...)
		if err != nil {
			return "", err
		}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
}

// mpsDaemonsDir is where the supervisor has a directory for each daemon, from
// before it is started until nothing of it is left; beside its socket.
const mpsDaemonsDir = "d"

// mpsRemains returns the names of the daemons that the supervisor has a directory
// for.
func mpsRemains(socket string) func() ([]string, error) {
	return func() ([]string, error) {
		entries, err := os.ReadDir(filepath.Join(filepath.Dir(socket), mpsDaemonsDir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		names := make([]string, 0, len(entries))
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names, nil
	}
}
