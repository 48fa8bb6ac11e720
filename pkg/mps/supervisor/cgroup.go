package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/kubepods"
)

// group is a cgroup that a daemon of a name may have, in one hierarchy.
type group struct {
	// parent is a directory that no container ends with.
	parent string
	// unified is set for version 2.
	unified bool
	// cpuset: a new cgroup has no processors and no memory nodes until it is given
	// some (version 1).
	cpuset bool
}

const groupName = "tessera-mps"

func (g group) dir(name string) string { return filepath.Join(g.parent, groupName, name) }

// groups returns the cgroups for daemons: beside those of the pods, in each
// hierarchy. None where this process isn't in a container: then its own cgroup is
// as good. errNoPod where it is in a container that isn't a pod's.
func groups() ([]group, error) {
	membership, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("read which cgroups this process is in: %w", err)
	}
	first, err := os.ReadFile("/proc/1/cgroup")
	if err != nil {
		return nil, fmt.Errorf("read which cgroups the host's first process is in: %w", err)
	}
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read where cgroups are mounted: %w", err)
	}
	return parseGroups(string(membership), string(first), string(mounts))
}

// parseGroups takes the texts of /proc/PID/cgroup of this process and of the
// host's first, and of /proc/PID/mountinfo.
func parseGroups(membership, first, mounted string) ([]group, error) {
	var cgroups strings.Builder // the library fails for all mounts if it can't read one
	for line := range strings.Lines(mounted) {
		if strings.Contains(line, " - cgroup") {
			cgroups.WriteString(line)
		}
	}
	mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(cgroups.String()), cgroupMount)
	if err != nil {
		return nil, fmt.Errorf("read where cgroups are mounted: %w", err)
	}
	var found []group
	for line := range strings.Lines(membership) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		outside, ok := kubepods.Above(parts[2])
		if !ok {
			continue
		}
		dir, ok := findCgroup(mounts, parts[1], outside)
		if !ok {
			return nil, fmt.Errorf("the cgroup %s (%s) is mounted nowhere here: mount the host's /sys/fs/cgroup, or daemons would end with this container",
				outside, parts[1])
		}
		found = append(found, group{parent: dir, unified: parts[1] == "", cpuset: slices.Contains(strings.Split(parts[1], ","), "cpuset")})
	}
	if id := containerPattern.FindString(membership); len(found) == 0 && id != "" && !strings.Contains(first, id) {
		return nil, errNoPod
	}
	return found, nil
}

// errNoPod says that a daemon would end with this container.
var errNoPod = errors.New("this process is in a container whose cgroup is below none of the kubelet's for pods (named kubepods, or ending in -kubepods), and MPS daemons would end with the container: " +
	"have the kubelet make cgroups for pods (cgroupsPerQOS: true, its default), or run mps-supervisor as a service of the host")

// containerPattern is the id of a container, which every runtime has in the name of its cgroup.
var containerPattern = regexp.MustCompile(`\b[0-9a-f]{64}\b`)

// cgroupMount is a mountinfo filter that keeps the writable mounts of cgroups.
func cgroupMount(m *mountinfo.Info) (skip, stop bool) {
	return !strings.HasPrefix(m.FSType, "cgroup") || slices.Contains(strings.Split(m.Options, ","), "ro"), false
}

// findCgroup returns the directory of a cgroup of the hierarchy with these
// controllers, as /proc/PID/cgroup names them.
func findCgroup(mounts []*mountinfo.Info, controllers, cgroup string) (string, bool) {
	for _, m := range slices.Backward(mounts) { // a later one may hide an earlier one
		if !showsHierarchy(m, controllers) {
			continue
		}
		if rel, err := filepath.Rel(m.Root, cgroup); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
			return filepath.Join(m.Mountpoint, rel), true
		}
	}
	return "", false
}

// showsHierarchy reports whether a mount shows the hierarchy with these controllers; none: version 2.
func showsHierarchy(m *mountinfo.Info, controllers string) bool {
	if controllers == "" || m.FSType == "cgroup2" {
		return controllers == "" && m.FSType == "cgroup2"
	}
	theirs := strings.Split(m.VFSOptions, ",")
	for c := range strings.SplitSeq(controllers, ",") {
		if !slices.Contains(theirs, c) {
			return false
		}
	}
	return true
}

// leaveCgroup creates the cgroups of the daemon, and has the command, which this
// thread must start, begin in them. done is to be called when it has been started.
// The thread must end after that, because of version 1 it enters the cgroups itself.
func leaveCgroup(name string, cmd *exec.Cmd) (done func(), err error) {
	joinHostCgroups()
	all, err := groups()
	if err != nil {
		return nil, err
	}
	done = func() {}
	for _, g := range all {
		if err := g.create(name); err != nil {
			return nil, err
		}
		if !g.unified {
			// "tasks" moves one thread, cgroup.procs would move all of this process.
			if err := writeControl(filepath.Join(g.dir(name), "tasks"), "0"); err != nil {
				return nil, fmt.Errorf("leave the container's cgroup: %w", err)
			}
			continue
		}
		// A process that begins there costs nothing. To move one, the kernel waits until
		// all processors have passed through it, some ten milliseconds.
		dir, err := os.Open(g.dir(name))
		if err != nil {
			return nil, fmt.Errorf("leave the container's cgroup: %w", err)
		}
		done = func() { _ = dir.Close() }
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	}
	return done, nil
}

// create creates the daemon's cgroup.
func (g group) create(name string) error {
	for _, dir := range []string{filepath.Join(g.parent, groupName), g.dir(name)} {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make the cgroup of the MPS daemon: %w", err)
		}
		if g.cpuset {
			if err := inheritCPUs(dir); err != nil {
				return fmt.Errorf("give the cgroup of the MPS daemon processors: %w", err)
			}
		}
	}
	return nil
}

// inheritCPUs copies the parent's processors and memory nodes to a new cpuset of
// version 1.
func inheritCPUs(dir string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		own, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return err
		}
		if strings.TrimSpace(string(own)) != "" {
			continue
		}
		theirs, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
		if err != nil {
			return err
		}
		if err := writeControl(filepath.Join(dir, file), strings.TrimSpace(string(theirs))); err != nil {
			return err
		}
	}
	return nil
}

// writeControl writes to a file of the kernel's, which takes it at once or not
// at all.
func writeControl(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// joinHostCgroups makes the calling thread see cgroups as the host does: the
// runtime may have given the container a namespace in which its own cgroup is the
// top. It needs the host's PID view; without it all stays as it is.
func joinHostCgroups() {
	fd, err := unix.Open("/proc/1/ns/cgroup", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_ = unix.Setns(fd, unix.CLONE_NEWCGROUP)
}

// hostGroups is groups as the host sees them.
func hostGroups() (found []group, err error) {
	driverroot.OnOwnThread(func() {
		joinHostCgroups()
		found, err = groups()
	})
	return found, err
}

// removeGroups removes the cgroups of a daemon that has ended. A process is in
// its cgroup for a moment longer than it can be seen to live.
func removeGroups(ctx context.Context, all []group, name string) error {
	var errs []error
	for _, g := range all {
		if err := removeEmptied(ctx, g.dir(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the cgroup of the MPS daemon: %w", err))
		}
	}
	return errors.Join(errs...)
}

func removeEmptied(ctx context.Context, dir string) error {
	for {
		err := os.Remove(dir)
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(2 * time.Millisecond):
		}
	}
}
