// Package files replaces, removes and locks files, and seals records that are to be in one. If
// the process dies, a path has the old file or the new one, complete. Only MakeDir and SyncDir
// sync something; a caller whose file must survive a power loss syncs the file and, with
// SyncDir, its name.
package files

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Replace closes a temporary file that the caller has written, and renames it to path, which
// is in the same directory. After an error, that of writing included, the temporary file is
// removed, and path is as it was. Replace doesn't sync anything: the caller may sync the file
// before, and the directory afterwards.
func Replace(path string, temp *os.File, written error) error {
	err := errors.Join(written, temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return nil
}

// RemoveIfThere removes a file or an empty directory. A missing one isn't an error.
func RemoveIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// RemoveIfEmpty is RemoveIfThere for a directory that stays if something is in it.
func RemoveIfEmpty(dir string) error {
	if err := RemoveIfThere(dir); !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// TryLock locks an open file or directory exclusively, without waiting. It returns false if it is
// locked through another open of it. The lock lasts until f is closed, in this process and in
// those that it was passed to.
func TryLock(f *os.File) (bool, error) {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return true, nil
}

// MakeDir makes a directory, and those above it that are missing. When it returns nil,
// the names of the directory and of those that this call made survive a power loss. The
// name of a directory above it that an earlier process made isn't synced again.
func MakeDir(dir string, mode os.FileMode) error {
	parent := filepath.Dir(dir)
	err := os.Mkdir(dir, mode)
	if errors.Is(err, fs.ErrNotExist) && parent != dir {
		if err := MakeDir(parent, mode); err != nil {
			return err
		}
		err = os.Mkdir(dir, mode)
	}
	if err != nil {
		if info, statErr := os.Stat(dir); statErr != nil || !info.IsDir() {
			return err
		}
	}
	return SyncDir(parent)
}

// SyncDir makes the names in a directory survive a power loss.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
