package mps

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// RunDir is the run directory of a supervisor: its socket, and a directory for each
// daemon, from before the daemon is started until nothing of it is left. It is on a
// tmpfs.
type RunDir string

// RunDirOf returns the run directory of the supervisor with this socket.
func RunDirOf(socket string) RunDir { return RunDir(filepath.Dir(socket)) }

// Socket is where the supervisor listens.
func (d RunDir) Socket() string { return filepath.Join(string(d), "supervisor.sock") }

// Daemons is the directory that has those of the daemons.
func (d RunDir) Daemons() string { return filepath.Join(string(d), "d") }

// Daemon is the directory of a daemon.
func (d RunDir) Daemon(name string) string { return filepath.Join(d.Daemons(), name) }

// RecordFile is the name of the file in a daemon's directory with its Record.
const RecordFile = "daemon.json"

func (d RunDir) record(name string) string { return filepath.Join(d.Daemon(name), RecordFile) }

// Names returns the names of the daemons that have a directory; none where there is no
// run directory.
func (d RunDir) Names() ([]string, error) {
	entries, err := os.ReadDir(d.Daemons())
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
