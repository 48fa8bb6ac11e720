package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// All clients of a daemon write to its /dev/shm where the driver is older than
// 580, and nothing but this bounds them: a file system of its own, as a container's
// /dev/shm is, and not the host's /run. Nothing is reserved.
const (
	shmSize   = 512 << 20
	shmInodes = 16 << 10
)

// mountShm mounts a file system for the daemon's /dev/shm. It stays mounted when the
// daemon is replaced, because containers use it. Mounts reach the host
// and containers where the run directory is mounted with propagation.
// Idempotent.
func (p place) mountShm() error {
	mounted, err := isMount(p.shm())
	if err != nil || mounted {
		return err
	}
	options := fmt.Sprintf("size=%d,nr_inodes=%d,mode=1777", shmSize, shmInodes)
	if err := unix.Mount("shm", p.shm(), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		return fmt.Errorf("mount a tmpfs at %s (is this process privileged?): %w", p.shm(), err)
	}
	return nil
}

// unmountShm empties the directory and undoes mountShm. It empties it first because
// the file system may stay mounted for a while in other mount namespaces.
func (p place) unmountShm() error {
	mounted, err := isMount(p.shm())
	if err != nil || !mounted {
		return err
	}
	if err := empty(p.shm()); err != nil {
		return fmt.Errorf("empty %s: %w", p.shm(), err)
	}
	if err := unix.Unmount(p.shm(), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", p.shm(), err)
	}
	return nil
}

// isMount reports whether a file system is mounted at the directory. It is false if
// there is no such directory.
func isMount(dir string) (bool, error) {
	var own, parent unix.Stat_t
	if err := unix.Lstat(dir, &own); errors.Is(err, os.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("look at %s: %w", dir, err)
	}
	if err := unix.Lstat(filepath.Dir(dir), &parent); err != nil {
		return false, fmt.Errorf("look at the directory of %s: %w", dir, err)
	}
	return own.Dev != parent.Dev, nil
}
