package node

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/mps/supervisor"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// mpsDaemonsDir is where the supervisor has a directory for each daemon, from
// before it is started until nothing of it is left; beside its socket.
const mpsDaemonsDir = "d"

// mpsRemains returns the daemons that the supervisor has a directory for. One whose
// record can't be read has only its name.
func mpsRemains(socket string) func() ([]mps.Daemon, error) {
	return func() ([]mps.Daemon, error) {
		names, err := mpsDirectories(socket)
		if err != nil {
			return nil, err
		}
		remains := make([]mps.Daemon, 0, len(names))
		for _, name := range names {
			d, err := supervisor.RecordedDaemon(filepath.Dir(socket), name)
			if err != nil {
				d = mps.Daemon{Name: name}
			}
			remains = append(remains, d)
		}
		return remains, nil
	}
}

// mpsDirectories returns the names of the daemons that the supervisor has a directory
// for.
func mpsDirectories(socket string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(filepath.Dir(socket), mpsDaemonsDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		if e.IsDir() { // a renamed record is a file
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// shared reads MPS daemons and settings of GPUs for the doctor.
type shared struct {
	ctx     context.Context //nolint:containedctx // of one examination
	daemons sharing.Daemons
	socket  string
	// session and smi are nil where there is no driver.
	session *nvml.Session
	smi     sharing.SMI
}

// askWithin bounds each question.
const askWithin = 10 * time.Second

func (s shared) Daemons() ([]mps.State, error) {
	ctx, cancel := context.WithTimeout(s.ctx, askWithin)
	defer cancel()
	return s.daemons.List(ctx)
}

func (s shared) Remains() ([]string, error) { return mpsDirectories(s.socket) }

func (s shared) ComputeMode(uuid gpu.UUID) (nvml.ComputeMode, error) {
	if s.session == nil {
		return "", nvml.ErrDriverNotLoaded
	}
	return s.session.ComputeMode(uuid)
}

func (s shared) TimeSlice(uuid gpu.UUID) (string, error) {
	if s.smi == nil {
		return "", nvml.ErrDriverNotLoaded
	}
	ctx, cancel := context.WithTimeout(s.ctx, askWithin)
	defer cancel()
	return sharing.ReadTimeSlice(ctx, s.smi, uuid)
}
