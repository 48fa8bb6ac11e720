package node

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// The contents of the plugin's data directory.
const (
	lockFile   = "lock"
	journalDir = "claims"
	marksDir   = "containers"
	hookFile   = "bin/nvidia-cdi-hook"
	hookTemp   = hookFile + ".tmp" // while it is installed
)

// lockPoll is how often the data directory's lock is tried.
const lockPoll = 200 * time.Millisecond

// lockDataDir waits until no other plugin uses the directory: in an update the
// old one may still be finishing. The lock ends with the process, or with the
// file.
func lockDataDir(ctx context.Context, dir string) (*os.File, error) {
	for {
		f, err := openLock(dir)
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
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, fmt.Errorf("--data-dir: %w", err)
		}
	}
}

func openLock(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
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

// installHook puts the program where the container runtime, on the host, can
// start it. Containers may be starting with the present one: it is replaced
// whole, and only by another.
func installHook(from, dataDir string) (string, error) {
	path := filepath.Join(dataDir, hookFile)
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("--data-dir: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err == nil && st.Flags&unix.ST_NOEXEC != 0 {
		return "", fmt.Errorf("--data-dir: %s is mounted noexec, but container runtimes have to start %s there: choose another directory", dataDir, hookFile)
	}
	program, err := os.Open(from)
	if err != nil {
		return "", fmt.Errorf("--cdi-hook: %w", err)
	}
	defer program.Close()
	want, err := digest(program)
	if err != nil {
		return "", fmt.Errorf("--cdi-hook: %w", err)
	}
	if have, err := digestOf(path); err == nil && have == want {
		return path, nil
	}
	if err := replaceProgram(path, filepath.Join(dataDir, hookTemp), program); err != nil {
		return "", fmt.Errorf("install %s: %w", path, err)
	}
	return path, nil
}

func replaceProgram(path, temp string, program io.ReadSeeker) error {
	if _, err := program.Seek(0, io.SeekStart); err != nil {
		return err
	}
	tmp, err := os.OpenFile(temp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o700)
	if err != nil {
		return err
	}
	_, err = io.Copy(tmp, program)
	err = errors.Join(err, tmp.Chmod(0o755), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	return nil
}

func digest(r io.Reader) (string, error) {
	h := sha256.New()
	_, err := io.Copy(h, r)
	return string(h.Sum(nil)), err
}

// digestOf fails for a file that isn't an executable as it should be.
func digestOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.Mode() != 0o755 {
		return "", errors.Join(err, fs.ErrInvalid)
	}
	return digest(f)
}

// cleanDataDir removes the plugin's files from its data directory, and the directory
// if nothing else is in it.
func cleanDataDir(dataDir string) error {
	return errors.Join(
		removeIfThere(filepath.Join(dataDir, hookFile)),
		removeIfThere(filepath.Join(dataDir, hookTemp)),
		removeIfEmpty(filepath.Join(dataDir, filepath.Dir(hookFile))),
		removeIfEmpty(filepath.Join(dataDir, journalDir, journal.GPUDir)),
		removeIfEmpty(filepath.Join(dataDir, journalDir, journal.SettingsDir)),
		removeIfEmpty(filepath.Join(dataDir, journalDir)),
		removeIfEmpty(filepath.Join(dataDir, marksDir)),
		removeIfThere(filepath.Join(dataDir, lockFile)),
	)
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func removeIfEmpty(dir string) error {
	if err := removeIfThere(dir); !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// bootIDFile has an id that differs for each boot of the kernel.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

func readBootID() (string, error) {
	id, err := os.ReadFile(bootIDFile)
	if err != nil {
		return "", fmt.Errorf("tell this boot from others: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}
