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
	hookFile   = "bin/nvidia-cdi-hook"
	hookTemp   = hookFile + ".tmp" // while it is installed
)

// lockPoll is how often the data directory's lock is tried.
const lockPoll = 200 * time.Millisecond

// Dir is the data directory of a plugin that has locked it.
type Dir struct {
	path string
	lock *os.File
}

// Lock waits until no other plugin uses the directory: in an update the old one may
// still be finishing. It makes the directory if it isn't there. The lock ends with
// Close or the process.
func Lock(ctx context.Context, path string) (*Dir, error) {
	for {
		f, err := openLock(path)
		if err != nil {
			return nil, fmt.Errorf("--data-dir: %w", err)
		}
		if err := lock(ctx, f); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		// The plugin before may have taken the file away when it left.
		mine, err := f.Stat()
		now, nowErr := os.Stat(f.Name())
		if err == nil && nowErr == nil && os.SameFile(mine, now) {
			return &Dir{path: path, lock: f}, nil
		}
		if err := f.Close(); err != nil {
			return nil, fmt.Errorf("--data-dir: %w", err)
		}
	}
}

func openLock(dir string) (*os.File, error) {
	if err := files.MakeDir(dir, 0o755); err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
}

// lock waits for the lock, or the end of ctx.
func lock(ctx context.Context, f *os.File) error {
	for waited := false; ; waited = true {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		if !waited {
			klog.FromContext(ctx).Info("Another plugin uses the data directory, waiting for it to end", "path", f.Name())
		}
		select {
		case <-time.After(lockPoll):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Close lets another plugin use the directory.
func (d *Dir) Close() error { return d.lock.Close() }

// Journal returns the path of the journal's directory.
func (d *Dir) Journal() string { return JournalOf(d.path) }

// JournalOf returns the path of the journal's directory in a data directory, which
// needn't be locked to read it.
func JournalOf(path string) string { return filepath.Join(path, journalDir) }

// Marks returns the path of the directory of the marks of claims' containers.
func (d *Dir) Marks() string { return filepath.Join(d.path, marksDir) }

// Clean removes the hook program and the lock file, and removes bin/, the journal's
// and the marks' directories if they are empty.
func (d *Dir) Clean() error {
	return errors.Join(
		files.RemoveIfThere(filepath.Join(d.path, hookFile)),
		files.RemoveIfThere(filepath.Join(d.path, hookTemp)),
		files.RemoveIfEmpty(filepath.Join(d.path, filepath.Dir(hookFile))),
		files.RemoveIfEmpty(d.Journal()),
		files.RemoveIfEmpty(d.Marks()),
		files.RemoveIfThere(filepath.Join(d.path, lockFile)),
	)
}

// Remove removes the directory itself after Clean. It stays if others have put
// something there, or if it is a mount.
func (d *Dir) Remove() { _ = os.Remove(d.path) }
