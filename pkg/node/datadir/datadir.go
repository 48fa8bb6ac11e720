package datadir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/files"
)

// The contents of the directory.
const (
	lockFile   = "lock"
	journalDir = "claims"
	marksDir   = "containers"
	hookFile   = "bin/nvidia-cdi-hook" // also in the other directories that may have it
	hookTemp   = hookFile + ".tmp"     // while it is installed
	socketFile = "lock.sock"           // where the plugin that has the lock is asked for it
)

// LockPoll is how often a plugin that waits for the data directory tries its lock.
const LockPoll = 200 * time.Millisecond

// Dir is the data directory of a plugin that has locked it.
type Dir struct {
	path string
	lock *os.File
	// hooks has the other directories in which InstallHook may have put the hook program.
	hooks []string
}

// Lock waits until no other plugin uses the directory: in an update the old one may
// still be finishing. It makes the directory if it isn't there. The lock ends with
// Close or the process.
func Lock(ctx context.Context, path string) (*Dir, error) {
	for waited := false; ; waited = true {
		d, locked, err := TryLock(path)
		if locked || err != nil {
			return d, err
		}
		if !waited {
			klog.FromContext(ctx).Info("Another plugin uses the data directory, waiting for it to end", "path", path)
		}
		select {
		case <-time.After(LockPoll):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// TryLock is Lock without waiting: locked is false while another plugin uses the
// directory.
func TryLock(path string) (_ *Dir, locked bool, err error) {
	f, err := openLock(path)
	if err != nil {
		return nil, false, fmt.Errorf("--data-dir: %w", err)
	}
	locked, err = lock(f, path)
	if locked && err == nil {
		return &Dir{path: path, lock: f}, true, nil
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, false, fmt.Errorf("--data-dir: %w", err)
	}
	return nil, false, nil
}

// lock returns false while another plugin has the lock, and if the plugin before has
// removed the file from the directory when it left: the next one to open is another.
func lock(f *os.File, dir string) (bool, error) {
	if locked, err := files.TryLock(f); !locked {
		return false, err
	}
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	now, err := os.Stat(filepath.Join(dir, lockFile))
	return err == nil && os.SameFile(mine, now), nil
}

func openLock(dir string) (*os.File, error) {
	if err := files.MakeDir(dir, 0o755); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
}

// Close lets another plugin use the directory.
func (d *Dir) Close() error { return d.lock.Close() }

// File returns the locked file. The process that it is sent to has the lock, too; it alone once
// this one has called Close.
func (d *Dir) File() *os.File { return d.lock }

// Adopt returns the directory at path with the lock that another plugin has sent. It closes
// the file if it returns an error.
func Adopt(path string, given *os.File) (*Dir, error) {
	locked, err := lock(given, path)
	if err == nil && !locked {
		err = fmt.Errorf("the file that the other plugin sent isn't the lock of %s", path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--data-dir: %w", err), given.Close())
	}
	return &Dir{path: path, lock: given}, nil
}

// HandoverSocketOf returns the socket at which the plugin that has locked a data
// directory is asked for it.
func HandoverSocketOf(path string) string { return filepath.Join(path, socketFile) }

// HandoverSocket returns the same of this directory.
func (d *Dir) HandoverSocket() string { return HandoverSocketOf(d.path) }

// Journal returns the path of the journal's directory.
func (d *Dir) Journal() string { return JournalOf(d.path) }

// JournalOf returns the path of the journal's directory in a data directory, which
// needn't be locked to read it.
func JournalOf(path string) string { return filepath.Join(path, journalDir) }

// Marks returns the path of the directory of the marks of claims' containers.
func (d *Dir) Marks() string { return filepath.Join(d.path, marksDir) }

// Clean removes the hook program wherever it is, a socket and the lock file, and removes bin/,
// the journal's and the marks' directories if they are empty.
func (d *Dir) Clean() error {
	var err error
	for _, dir := range d.hookDirs() {
		err = errors.Join(err, removeHook(dir))
	}
	return errors.Join(err,
		files.RemoveIfEmpty(d.Journal()),
		files.RemoveIfEmpty(d.Marks()),
		files.RemoveIfThere(d.HandoverSocket()),
		files.RemoveIfThere(filepath.Join(d.path, lockFile)),
	)
}

// Remove removes the directory itself after Clean. It stays if others have put
// something there, or if it is a mount.
func (d *Dir) Remove() { _ = os.Remove(d.path) }
