package driverroot

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Host is the node's own file system as this process sees it: mounted
// somewhere in the plugin's container, or simply "/". Make one with NewHost.
type Host struct{ mount string }

// NewHost returns the file system mounted at an absolute path.
func NewHost(mount string) Host { return Host{mount: filepath.Clean(mount)} }

// Path is where this process finds a path of the host that has no symbolic
// link on its way, or none that leaves its directory (see Do).
func (h Host) Path(hostPath string) string {
	return filepath.Join(h.mount, hostPath)
}

// Do calls f so that every path f uses, and every symbolic link on its way, is
// the host's: on a thread of its own whose root directory is the host's, and
// which ends with f. f must not start goroutines that use files; file descriptors
// it opens stay valid afterwards. Needs CAP_SYS_CHROOT unless the host is mounted
// at "/".
func (h Host) Do(f func() error) error {
	if h.mount == "/" {
		return f()
	}
	done := make(chan error)
	go onThread(func() {
		err := h.enter()
		if err == nil {
			err = f()
		}
		done <- err
	})
	return <-done
}

// onThread calls f on a thread that ends with the calling goroutine, and that isn't
// the first one: others know this process by the first one's root directory.
func onThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() != os.Getpid() {
		f()
		return
	}
	defer runtime.UnlockOSThread()
	done := make(chan struct{})
	go func() {
		defer close(done)
		onThread(f) // another, since this one is taken
	}()
	<-done
}

// enter gives the calling thread a root directory of its own.
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
