package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroupTop is the group of all clusters, in every hierarchy; each cluster has
// one below it, each machine one below that.
const cgroupTop = "localcluster"

// hostLeaf takes the processes of the root group where cgroup v2 doesn't let a
// group have both processes and controlled children, as in a container.
const hostLeaf = "localcluster-host"

// hierarchy is one mounted cgroup tree.
type hierarchy struct {
	path string
	// v2 means the unified tree with the main controllers. The one beside
	// cgroup v1, which has none of them, only takes groups and processes.
	v2     bool
	cpuset bool
}

// hierarchies lists the cgroup trees that the host has.
func hierarchies() ([]hierarchy, error) {
	data, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, fmt.Errorf("list the cgroup hierarchies: %w", err)
	}
	found := parseHierarchies(string(data), func(path string) bool {
		controllers, err := os.ReadFile(filepath.Join(path, "cgroup.controllers"))
		return err == nil && slices.Contains(strings.Fields(string(controllers)), "memory")
	})
	if len(found) == 0 {
		return nil, errors.New("this host has no cgroup file system mounted: mount one at /sys/fs/cgroup")
	}
	return found, nil
}

func parseHierarchies(mounts string, hasControllers func(path string) bool) []hierarchy {
	var found []hierarchy
	for line := range strings.Lines(mounts) {
		fields := strings.Fields(line)
		if len(fields) < 4 || !strings.HasPrefix(fields[1], "/sys/fs/cgroup") {
			continue
		}
		switch fields[2] {
		case "cgroup":
			found = append(found, hierarchy{path: fields[1], cpuset: slices.Contains(strings.Split(fields[3], ","), "cpuset")})
		case "cgroup2":
			found = append(found, hierarchy{path: fields[1], v2: hasControllers(fields[1])})
		}
	}
	return found
}

// createCgroup makes the group in every hierarchy, with all controllers of
// cgroup v2 enabled in it; it can't enable any for children, since it is to
// take processes.
func createCgroup(group string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if err := h.create(group); err != nil {
			return fmt.Errorf("create the cgroup %s in %s: %w", group, h.path, err)
		}
	}
	return nil
}

func (h hierarchy) create(group string) error {
	if h.v2 {
		if err := h.enableInRoot(); err != nil {
			return err
		}
	}
	path := h.path
	for part := range strings.SplitSeq(group, "/") {
		if err := h.makeChild(path, part); err != nil {
			return err
		}
		path = filepath.Join(path, part)
	}
	return nil
}

func (h hierarchy) makeChild(parent, name string) error {
	if h.v2 && parent != h.path {
		if err := enableControllers(parent); err != nil {
			return err
		}
	}
	path := filepath.Join(parent, name)
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if h.cpuset {
		return inheritCpuset(path)
	}
	return nil
}

// inheritCpuset copies a parent's CPUs and memory nodes: cgroup v1 takes no
// process into a group without them.
func inheritCpuset(path string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		own, err := os.ReadFile(filepath.Join(path, file))
		if err != nil {
			return err
		}
		if strings.TrimSpace(string(own)) != "" {
			continue
		}
		parent, err := os.ReadFile(filepath.Join(filepath.Dir(path), file))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(path, file), parent, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// enableControllers passes all of a group's controllers on to its children.
func enableControllers(path string) error {
	available, err := os.ReadFile(filepath.Join(path, "cgroup.controllers"))
	if err != nil {
		return err
	}
	enabled, err := os.ReadFile(filepath.Join(path, "cgroup.subtree_control"))
	if err != nil {
		return err
	}
	for controller := range strings.FieldsSeq(string(available)) {
		if slices.Contains(strings.Fields(string(enabled)), controller) {
			continue
		}
		if err := os.WriteFile(filepath.Join(path, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
			return fmt.Errorf("enable the controller %s in %s: %w", controller, path, err)
		}
	}
	return nil
}

// enableInRoot enables the controllers in the root group, moving its processes
// to a leaf where the kernel demands it.
func (h hierarchy) enableInRoot() error {
	err := enableControllers(h.path)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	leaf := filepath.Join(h.path, hostLeaf)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	// Processes may fork while they are being moved.
	for range 20 {
		if err := moveProcesses(h.path, leaf); err != nil {
			return err
		}
		if err = enableControllers(h.path); !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return err
}

func moveProcesses(from, to string) error {
	pids, err := readPIDs(filepath.Join(from, "cgroup.procs"))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		err := os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644)
		// A process may have ended; kernel threads can't move.
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("move process %d to the cgroup %s: %w", pid, to, err)
		}
	}
	return nil
}

// restoreRoot undoes enableInRoot where it had to move processes, once no
// cluster is left.
func restoreRoot() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if err := h.restoreRoot(); err != nil {
			return fmt.Errorf("restore the root cgroup: %w", err)
		}
	}
	return nil
}

func (h hierarchy) restoreRoot() error {
	leaf := filepath.Join(h.path, hostLeaf)
	if _, err := os.Stat(leaf); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	control := filepath.Join(h.path, "cgroup.subtree_control")
	enabled, err := os.ReadFile(control)
	if err != nil {
		return err
	}
	for controller := range strings.FieldsSeq(string(enabled)) {
		if err := os.WriteFile(control, []byte("-"+controller), 0o644); err != nil {
			return err
		}
	}
	for range 20 {
		if err := moveProcesses(leaf, h.path); err != nil {
			return err
		}
		if err = os.Remove(leaf); !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return err
}

// enterCgroup puts a process into the group in every hierarchy.
func enterCgroup(group string, pid int) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		procs := filepath.Join(h.path, group, "cgroup.procs")
		if err := os.WriteFile(procs, []byte(strconv.Itoa(pid)), 0o644); err != nil {
			return fmt.Errorf("put process %d into a cgroup: %w", pid, err)
		}
	}
	return nil
}

// emptyCgroup kills every process in the group and below it, in all
// hierarchies, and waits until they are gone.
func emptyCgroup(ctx context.Context, group string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		pids, err := groupPIDs(group)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("kill process %d of %s: %w", pid, group, err)
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v of %s don't end: %w", pids, group, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// groupPIDs lists the processes of the group and all groups below it. A group
// that doesn't exist has none.
func groupPIDs(group string) ([]int, error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, h := range all {
		err := walkGroups(filepath.Join(h.path, group), func(dir string) error {
			found, err := readPIDs(filepath.Join(dir, "cgroup.procs"))
			pids = append(pids, found...)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("list the processes of %s: %w", group, err)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

func readPIDs(path string) ([]int, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil, nil // the group was removed meanwhile
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for field := range strings.FieldsSeq(string(data)) {
		// Processes outside our PID namespace show as 0.
		if pid, err := strconv.Atoi(field); err == nil && pid > 1 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// removeCgroup removes the group and all below it from every hierarchy. It
// must be empty of processes.
func removeCgroup(group string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		var dirs []string
		top := filepath.Join(h.path, group)
		if err := walkGroups(top, func(dir string) error { dirs = append(dirs, dir); return nil }); err != nil {
			return fmt.Errorf("remove the cgroup %s: %w", group, err)
		}
		slices.Reverse(dirs) // children first
		for _, dir := range dirs {
			if err := removeGroup(dir); err != nil {
				return fmt.Errorf("remove the cgroup %s: %w", group, err)
			}
		}
	}
	return nil
}

// removeGroup removes one empty group; the kernel may need a moment after the
// last process has ended.
func removeGroup(dir string) error {
	var err error
	for range 100 {
		if err = os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

// walkGroups calls visit for dir and every group below it, parents first.
func walkGroups(dir string, visit func(dir string) error) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case entry.IsDir():
			return visit(path)
		}
		return nil
	})
}
