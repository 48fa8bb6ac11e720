package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// launch says how a program of the driver is started.
type launch struct {
	hostRoot string
	program  driverroot.Program
	// place is the daemon's directory on the host.
	place place
	// group is the name of the cgroup that the program gets; empty: the supervisor's.
	group string
}

// command returns the program as a command for start. Its environment
// identifies the daemon.
func (l launch) command(ctx context.Context, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, l.program.Path, args...)
	cmd.Env, cmd.Dir = env, "/"
	return cmd
}

// start starts the command as a process of the host: outside of the container's
// cgroup, which ends with the container, and with the host's files, of which the
// daemon's directory is /dev/shm. It forks from a thread that has entered the host,
// so nothing else has to be started first.
func (l launch) start(cmd *exec.Cmd) error {
	if cmd.Stdin == nil { // the thread may see none
		null, err := os.Open(os.DevNull)
		if err != nil {
			return fmt.Errorf("start %s: %w", l.program.Path, err)
		}
		defer null.Close()
		cmd.Stdin = null
	}
	var err error
	driverroot.OnOwnThread(func() { err = l.startHere(cmd) })
	return err
}

// startHere is start for a thread that does nothing else afterwards.
func (l launch) startHere(cmd *exec.Cmd) error {
	if l.group != "" {
		done, err := leaveCgroup(l.group, cmd)
		if err != nil {
			return err
		}
		defer done()
	}
	if err := l.enterHost(); err != nil {
		return err
	}
	if err := explainStart(cmd, cmd.Start()); err != nil {
		return fmt.Errorf("run %s with the root directory %s: %w", l.program.Path, l.program.Root, err)
	}
	return nil
}

// explainStart adds to the error of starting the command that the kernel is too old,
// where it is.
func explainStart(cmd *exec.Cmd, err error) error {
	if errors.Is(err, unix.ENOSYS) && cmd.SysProcAttr != nil && cmd.SysProcAttr.UseCgroupFD {
		return fmt.Errorf("%w: on a node with cgroup v2, starting a daemon outside this container's cgroup needs Linux 5.7 (CLONE_INTO_CGROUP)", err)
	}
	return err
}

// enterHost gives the thread mounts of its own and the host's root directory.
func (l launch) enterHost() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("give the program mounts of its own (is this process privileged?): %w", err)
	}
	// A file system that the host unmounts later must not stay mounted because of
	// this program.
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep the program's mounts to itself: %w", err)
	}
	if err := enterRoot(l.hostRoot); err != nil {
		return fmt.Errorf("enter the host's file system at %s: %w", l.hostRoot, err)
	}
	if err := bind(l.place.shm(), "/dev/shm"); err != nil {
		return err
	}
	if l.program.Root == "/" {
		return nil
	}
	if err := l.furnish(); err != nil {
		return err
	}
	if err := unix.Chroot(l.program.Root); err != nil {
		return fmt.Errorf("enter the driver root %s: %w", l.program.Root, err)
	}
	return unix.Chdir("/")
}

// furnish mounts the directories that the daemon shares with its clients in the
// driver root.
func (l launch) furnish() error {
	inside := filepath.Join(l.program.Root, string(l.place))
	if err := os.MkdirAll(inside, 0o755); err != nil {
		return fmt.Errorf("make a place for the daemon's directory in the driver root: %w", err)
	}
	if err := bind(string(l.place), inside); err != nil {
		return err
	}
	return bind(l.place.shm(), filepath.Join(l.program.Root, "dev/shm"))
}

// unfurnish removes the place that furnish has made, when nothing is shown there
// any more.
func (d *driver) unfurnish(at place) {
	p, err := d.find()
	if err == nil && p.Root != "/" {
		_ = os.Remove(d.host.Path(filepath.Join(p.Root, string(at)))) // empty, or not ours
	}
}

// bind shows a directory at another path, if that is there.
func bind(source, target string) error {
	if _, err := os.Stat(target); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("show %s at %s: %w", source, target, err)
	}
	return nil
}

// enterRoot changes the root directory, and lets go of the old one where it can:
// it is a container's and is to be removed.
func enterRoot(root string) error {
	if root == "/" {
		return unix.Chdir("/")
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err == nil {
		// The old root now lies over the new one.
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return err
		}
		return unix.Chdir("/")
	}
	if err := unix.Chroot("."); err != nil { // not a mount: a directory of a test
		return err
	}
	return unix.Chdir("/")
}
