package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// launch is what a launcher process is told.
type launch struct {
	HostRoot string             `json:"launchHostRoot"`
	Program  driverroot.Program `json:"program"`
	Args     []string           `json:"args,omitempty"`
	// Place is the daemon's directory on the host.
	Place place `json:"place"`
	// Group is the name of the cgroup that the program gets; empty: this one.
	Group string `json:"group,omitempty"`
}

// launchPrefix is how the text of a launch begins, and no other's.
const launchPrefix = `{"launchHostRoot":`

// command returns what runs the program through the launcher. The environment is
// the program's from the beginning: that tells whose process it is.
func (l launch) command(ctx context.Context, launcher, env []string) (*exec.Cmd, error) {
	text, err := json.Marshal(l)
	if err != nil {
		return nil, fmt.Errorf("launch %s: %w", l.Program.Path, err)
	}
	cmd := exec.CommandContext(ctx, launcher[0], append(slices.Clip(launcher[1:]), string(text))...)
	cmd.Env, cmd.Dir = env, "/"
	return cmd, nil
}

// Launch becomes a program of the driver: it leaves the container's cgroup,
// which ends with the container, gets the host's files for its own, with the
// daemon's directory as /dev/shm, and then is replaced by the program. It returns
// only if that fails. The process must do nothing else.
func Launch(text string) error {
	var l launch
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	runtime.LockOSThread() // namespaces are a thread's, until it becomes the program
	if l.Group != "" {
		if err := l.leaveCgroup(); err != nil {
			return err
		}
	}
	if err := l.enterHost(); err != nil {
		return err
	}
	err := unix.Exec(l.Program.Path, append([]string{l.Program.Path}, l.Args...), os.Environ())
	return fmt.Errorf("run %s with the root directory %s: %w", l.Program.Path, l.Program.Root, err)
}

func (l launch) leaveCgroup() error {
	joinHostCgroups()
	all, err := groups()
	if err != nil {
		return err
	}
	for _, g := range all {
		if err := g.enter(l.Group); err != nil {
			return err
		}
	}
	// Not first in line when the node runs out of memory: all clients depend on it.
	_ = writeControl("/proc/self/oom_score_adj", "-900")
	return nil
}

// enterHost gives the thread mounts of its own and the host's root directory.
func (l launch) enterHost() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("give the program mounts of its own (is this process privileged?): %w", err)
	}
	// What the host unmounts later must not stay mounted because of this program.
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep the program's mounts to itself: %w", err)
	}
	if err := enterRoot(l.HostRoot); err != nil {
		return fmt.Errorf("enter the host's file system at %s: %w", l.HostRoot, err)
	}
	if err := bind(l.Place.shm(), "/dev/shm"); err != nil {
		return err
	}
	if l.Program.Root == "/" {
		return nil
	}
	if err := l.furnish(); err != nil {
		return err
	}
	if err := unix.Chroot(l.Program.Root); err != nil {
		return fmt.Errorf("enter the driver root %s: %w", l.Program.Root, err)
	}
	return unix.Chdir("/")
}

// furnish shows in the driver root what the daemon shares with its clients.
func (l launch) furnish() error {
	inside := filepath.Join(l.Program.Root, string(l.Place))
	if err := os.MkdirAll(inside, 0o755); err != nil {
		return fmt.Errorf("make a place for the daemon's directory in the driver root: %w", err)
	}
	if err := bind(string(l.Place), inside); err != nil {
		return err
	}
	return bind(l.Place.shm(), filepath.Join(l.Program.Root, "dev/shm"))
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
