package machine

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// viewCommand is the argument with which pid 1's program becomes a component that has a View.
const viewCommand = "view"

// commonView is what each component sees besides its View and the files of /etc.
func commonView() []string {
	return []string{"/proc", "/sys", "/dev", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", BinDir, StateDir}
}

// makeViews makes the directories that components see, which nobody can do later if the
// root is read-only.
func (r *root) makeViews() error {
	for _, component := range r.spec.Components {
		for _, dir := range component.View {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
		}
	}
	return nil
}

// viewedArgs are the arguments of pid 1's program that start a component in its view.
func viewedArgs(c Component) []string {
	return append([]string{viewCommand, strings.Join(c.View, ":")}, c.Args...)
}

// runViewed becomes a component, in the mount namespace that pid 1 gave it. It returns only
// when it fails.
func runViewed(dirs, args []string) error {
	if err := enterView(dirs); err != nil {
		return fmt.Errorf("set up the view of %s: %w", args[0], err)
	}
	program, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	if err := syscall.Exec(program, args, os.Environ()); err != nil { //nolint:gosec // a component of the machine, by its spec
		return fmt.Errorf("run %s: %w", program, err)
	}
	return nil
}

// enterView replaces the root of this mount namespace by an empty one with the given
// directories and the common ones.
func enterView(dirs []string) error {
	v, err := openView(dirs)
	if err != nil {
		return err
	}
	// What is open goes on sharing mounts with the machine. The rest isn't for it to see.
	if err := mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := mount("tmpfs", stage, "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	if err := v.attach(stage); err != nil {
		return err
	}
	if err := os.Chdir(stage); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root to %s: %w", stage, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the machine's root: %w", err)
	}
	return os.Chdir("/")
}

// view is what a component sees of the machine.
type view struct {
	trees []tree
	links map[string]string
}

// tree is a directory or file of the machine, copied as mount.
type tree struct {
	path string
	fd   int
	dir  bool
	all  bool // with what is mounted below it
}

// openView copies what is there of the directories. Where links lead to them, the view has
// the links too.
func openView(dirs []string) (*view, error) {
	v := &view{links: map[string]string{}}
	wanted, err := filesOfEtc()
	if err != nil {
		return nil, err
	}
	for _, path := range slices.Concat(dirs, commonView()) {
		target, err := filepath.EvalSymlinks(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if target != path {
			v.links[path] = target
		}
		wanted[target] = true
	}
	for _, path := range slices.Sorted(maps.Keys(wanted)) { // parents first
		if v.has(path) {
			continue
		}
		if err := v.open(path, wanted[path]); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// filesOfEtc are /etc and the single files that are mounted there. Directories that are
// mounted there are seen only if they are in the View.
func filesOfEtc() (map[string]bool, error) {
	points, err := hostMounts("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	wanted := map[string]bool{"/etc": false}
	for _, point := range points {
		if info, err := os.Stat(point); err == nil && !info.IsDir() && below(point, []string{"/etc"}) {
			wanted[point] = false
		}
	}
	return wanted, nil
}

// has reports whether a path is in the view already.
func (v *view) has(path string) bool {
	return slices.ContainsFunc(v.trees, func(t tree) bool { return t.all && below(path, []string{t.path}) })
}

func (v *view) open(path string, all bool) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if all {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, flags)
	if err != nil {
		return fmt.Errorf("copy the mounts of %s: %w", path, err)
	}
	v.trees = append(v.trees, tree{path: path, fd: fd, dir: info.IsDir(), all: all})
	return nil
}

// attach puts the view below a directory.
func (v *view) attach(at string) error {
	for _, t := range v.trees {
		target := filepath.Join(at, t.path)
		if err := makeMountPoint(target, t.dir); err != nil {
			return err
		}
		if err := unix.MoveMount(t.fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("mount %s: %w", target, err)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(v.links)) {
		if v.has(path) {
			continue
		}
		link := filepath.Join(at, path)
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			return err
		}
		if err := os.Symlink(v.links[path], link); err != nil {
			return err
		}
	}
	return v.finish(at)
}

// finish leaves the files of /etc to be read, and gives the view a /tmp.
func (v *view) finish(at string) error {
	etc := filepath.Join(at, "etc")
	if !v.has("/etc") {
		if err := mount("", etc, "", unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := mount("", etc, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return err
		}
	}
	if v.has("/tmp") {
		return nil
	}
	tmp := filepath.Join(at, "tmp")
	if err := os.MkdirAll(tmp, 0o755); err != nil {
		return err
	}
	return os.Chmod(tmp, 0o777|os.ModeSticky)
}
