package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s %s on %s: %w", fstype, source, target, err)
	}
	return nil
}

// hostMounts lists the mount points of a mountinfo file, in the order in which
// they were mounted.
func hostMounts(path string) ([]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("list the host's mounts: %w", err)
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var points []string
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			points = append(points, unescape.Replace(fields[4]))
		}
	}
	return points, nil
}

func below(path string, dirs []string) bool {
	for _, dir := range dirs {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return true
		}
	}
	return false
}

// bind mounts source, a directory or a file, on target, which is made if it
// isn't there.
func bind(source, target string, flags uintptr) error {
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	if err := makeMountPoint(target, info.IsDir()); err != nil {
		return err
	}
	return mount(source, target, "", unix.MS_BIND|flags, "")
}

func makeMountPoint(path string, dir bool) error {
	if dir {
		return os.MkdirAll(path, 0o755)
	}
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

// isMountPoint reports whether something is mounted on a directory or file.
func isMountPoint(path string) (bool, error) {
	var status unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_TYPE, &status); err != nil {
		return false, fmt.Errorf("look at %s: %w", path, err)
	}
	return status.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// coverWithOverlay mounts an overlay that takes all writes over a directory. They are kept in
// scratch.
func coverWithOverlay(path, scratch string) error {
	dir, err := os.MkdirTemp(scratch, "overlay-")
	if err != nil {
		return err
	}
	upper, work := filepath.Join(dir, "upper"), filepath.Join(dir, "work")
	if err := os.Mkdir(work, 0o755); err != nil {
		return err
	}
	if err := mkdirLike(upper, path); err != nil {
		return err
	}
	return mount("overlay", path, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", path, upper, work))
}

// mkdirLike makes a directory with the owner and mode of another one.
func mkdirLike(path, model string) error {
	var status unix.Stat_t
	if err := unix.Stat(model, &status); err != nil {
		return fmt.Errorf("look at %s: %w", model, err)
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		return err
	}
	return copyOwner(path, &status)
}

// copyOwner gives a file the owner and mode of another one. Chmod comes last: chown clears bits.
func copyOwner(path string, of *unix.Stat_t) error {
	if err := os.Chown(path, int(of.Uid), int(of.Gid)); err != nil {
		return err
	}
	if err := unix.Chmod(path, of.Mode&0o7777); err != nil {
		return fmt.Errorf("change the mode of %s: %w", path, err)
	}
	return nil
}
