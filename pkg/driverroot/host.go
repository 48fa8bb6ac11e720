package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Host is the node's own file system as this process sees it: mounted somewhere
// in the plugin's container, or simply "/". Create one with NewHost.
type Host struct{ mount string }

// NewHost returns the file system mounted at an absolute path.
func NewHost(mount string) Host { return Host{mount: filepath.Clean(mount)} }

// Path returns the path for this process of a path of the host. The path must
// have no symbolic links, except links that stay in their directory (see Do).
func (h Host) Path(hostPath string) string {
	return filepath.Join(h.mount, hostPath)
}

// Do calls f with the host's root directory, so that all paths that f uses, and
// all symbolic links in them, are resolved on the host. f runs on a separate
// thread, which ends with f. f must not start goroutines that use files; file
// descriptors that it opens stay valid afterwards. Do needs CAP_SYS_CHROOT
// unless the host is mounted at "/".
func (h Host) Do(f func() error) error {
	if h.mount == "/" {
		return f()
	}
	var err error
	OnOwnThread(func() {
		if err = h.enter(); err == nil {
			err = f()
		}
	})
	return err
}

// OnOwnThread calls f on a thread that ends afterwards, so f may change the thread's
// namespaces, root directory and cgroups. It isn't the main thread, which never ends, and
// whose root directory other programs see as that of this process.
func OnOwnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread ends with the goroutine, unless it is unlocked
		if unix.Gettid() != os.Getpid() {
			f()
			return
		}
		OnOwnThread(f) // gets another thread while the main one is kept here
		runtime.UnlockOSThread()
	}()
	<-done
}

// enter changes the root directory of the calling thread to the host's.
func (h Host) enter() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("give a thread its own root directory: %w", err)
	}
	if err := unix.Chroot(h.mount); err != nil {
		return fmt.Errorf("enter the host's file system at %s (is it mounted, and may this process chroot?): %w", h.mount, err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter the host's file system at %s: %w", h.mount, err)
	}
	return nil
}

// NoExec reports whether the host mounts a directory so that no program can be started in
// it. A bind mount in this process's container may have other flags than the mount of the
// host that it shows. What a directory that isn't there would have is that of the one above.
func (h Host) NoExec(dir string) (noexec bool, err error) {
	err = h.Do(func() error {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		for at := dir; errors.Is(err, fs.ErrNotExist) && at != "/"; {
			at = filepath.Dir(at)
			err = unix.Statfs(at, &st)
		}
		if err != nil {
			return fmt.Errorf("read how the host mounts %s: %w", dir, err)
		}
		noexec = st.Flags&unix.ST_NOEXEC != 0
		return nil
	})
	return noexec, err
}
