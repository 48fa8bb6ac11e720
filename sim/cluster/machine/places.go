package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Types of a Mount; "" is the fourth.
const (
	typeTmpfs   = "tmpfs"
	typeDisk    = "disk"
	typeOverlay = "overlay"
)

// place is a path of the machine's root where something is mounted or linked.
type place struct {
	path string
	make func() error
}

// mountPlaces makes all places of the machine's root. Parents come first, so that nothing
// hides what is mounted below it.
func (r *root) mountPlaces() error {
	for _, p := range r.places() {
		if err := p.make(); err != nil {
			return err
		}
	}
	return os.Chmod("/tmp", 0o777|os.ModeSticky)
}

// places of one path are in the order in which they cover each other.
func (r *root) places() []place {
	var all []place
	add := func(path string, make func() error) { all = append(all, place{filepath.Clean(path), make}) }
	for _, point := range r.shownHostMounts() {
		add(point, func() error { return bindFromHost(point, 0) })
	}
	for _, dir := range r.spec.Dirs {
		add(dir, func() error { return r.bindOwn(dir) })
	}
	for _, path := range r.spec.HostDirs {
		add(path, func() error { return bindFromHost(path, unix.MS_REC) })
	}
	add(StateDir, func() error { return bind(hostRoot+r.state, StateDir, 0) })
	add(BinDir, func() error { return bind(hostRoot+r.bin, BinDir, 0) })
	for _, m := range r.spec.Mounts {
		add(m.Path, func() error { return r.mount(m) })
	}
	for path, target := range r.spec.Links {
		add(path, func() error { return r.link(path, target) })
	}
	slices.SortStableFunc(all, func(a, b place) int { return strings.Compare(a.path, b.path) })
	return all
}

// shownHostMounts are the file systems that the host has mounted below its root (a second
// disk, single files that a container runtime put there), which an overlay doesn't
// include. Special file systems, hidden directories and what is below the machine's own
// file systems stay out.
func (r *root) shownHostMounts() []string {
	skipped := append([]string{"/proc", "/sys", "/dev", "/run", "/var/run", "/tmp", stage}, r.spec.HiddenDirs...)
	skipped = append(skipped, r.emptyPaths()...)
	return slices.DeleteFunc(slices.Clone(r.mounts), func(point string) bool { return point == "/" || below(point, skipped) })
}

// emptyPaths are the paths where the machine sees nothing of the host.
func (r *root) emptyPaths() []string {
	paths := slices.Clone(r.spec.Dirs)
	for _, m := range r.spec.Mounts {
		if m.Type == typeTmpfs || m.Type == typeDisk {
			paths = append(paths, m.Path)
		}
	}
	return paths
}

func bindFromHost(path string, flags uintptr) error {
	err := bind(hostRoot+path, path, flags)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return nil
	}
	return err
}

// bindOwn mounts the machine's own directory of that path.
func (r *root) bindOwn(path string) error {
	source := filepath.Join(hostRoot, r.state, FilesDir, path)
	if err := os.MkdirAll(source, 0o755); err != nil {
		return err
	}
	return bind(source, path, 0)
}

func (r *root) mount(m Mount) error {
	if filepath.Clean(m.Path) == "/" {
		if m.Type != "" {
			return fmt.Errorf("mount %s on /: the root can have other options, but not another type", m.Type)
		}
		return nil
	}
	if err := os.MkdirAll(m.Path, 0o755); err != nil {
		return err
	}
	switch m.Type {
	case "":
		return separate(m.Path)
	case typeTmpfs:
		return mountTmpfs(m.Path)
	case typeDisk:
		return r.bindOwn(m.Path)
	case typeOverlay:
		return takeWrites(m.Path)
	}
	return fmt.Errorf("mount %q on %s: there is no such type", m.Type, m.Path)
}

// mountTmpfs mounts an empty file system that has the mode and owner of the directory it covers.
func mountTmpfs(path string) error {
	var status unix.Stat_t
	if err := unix.Stat(path, &status); err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	data := fmt.Sprintf("mode=%04o,uid=%d,gid=%d", status.Mode&0o7777, status.Uid, status.Gid)
	return mount("tmpfs", path, "tmpfs", 0, data)
}

// takeWrites keeps writes to a directory in memory. The machine's root does so already, so
// that a directory in it only has to be a mount of its own, to stay writable when the root
// isn't. Overlays of overlays are avoided since the kernel only allows a few.
func takeWrites(path string) error {
	var here, top unix.Stat_t
	if err := errors.Join(unix.Stat(path, &here), unix.Stat("/", &top)); err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	if here.Dev == top.Dev {
		return separate(path)
	}
	return coverWithOverlay(path, scratch(""))
}

// separate makes a directory a mount, so that it can have options of its own.
func separate(path string) error {
	mounted, err := isMountPoint(path)
	if err != nil || mounted {
		return err
	}
	return bind(path, path, 0)
}

// setOptions is the last step: the others make directories in file systems that are
// read-only from now on.
func (r *root) setOptions() error {
	for _, m := range r.spec.Mounts {
		flags, err := mountFlags(m.Options)
		if err != nil {
			return fmt.Errorf("mount %s: %w", m.Path, err)
		}
		if err := mount("", m.Path, "", unix.MS_BIND|unix.MS_REMOUNT|flags, ""); err != nil {
			return err
		}
	}
	return nil
}

func mountFlags(options []string) (uintptr, error) {
	known := map[string]uintptr{"ro": unix.MS_RDONLY, "noexec": unix.MS_NOEXEC, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV}
	var flags uintptr
	for _, option := range options {
		flag, found := known[option]
		if !found {
			return 0, fmt.Errorf("there is no option %q", option)
		}
		flags |= flag
	}
	return flags, nil
}
