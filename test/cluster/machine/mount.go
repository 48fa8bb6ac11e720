package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// The new root is assembled here, on a file system that only this machine's
// mount namespace has.
const (
	stage    = "/mnt"
	newRoot  = stage + "/root"
	upperDir = stage + "/upper"
	workDir  = stage + "/work"
)

// mountRoot gives the machine its own view of the host: the host's root file
// system under a layer that takes all writes and vanishes with the machine,
// own directories where the spec wants them, own /proc, /sys and /run.
func mountRoot(spec *Spec) error {
	mounts, err := hostMounts("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	steps := []func() error{
		func() error { return mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		mountOverlay,
		func() error { return mountHostFileSystems(mounts, spec) },
		mountKernelFileSystems,
		func() error { return bindOwnDirs(spec) },
		func() error { return maskSysctls(spec) },
		switchRoot,
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("set up the machine's file systems: %w", err)
		}
	}
	return nil
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s %s on %s: %w", fstype, source, target, err)
	}
	return nil
}

// mountOverlay mounts the host's root below a tmpfs layer. The layer can't lie
// on the host's root itself: overlayfs refuses layers inside each other.
func mountOverlay() error {
	if err := mount("tmpfs", stage, "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	for _, dir := range []string{newRoot, upperDir, workDir} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", upperDir, workDir)
	return mount("overlay", newRoot, "overlay", 0, options)
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

// mountHostFileSystems shows what the host has mounted below its root (a
// second disk, single files that a container runtime put there), which an
// overlay doesn't include. Special file systems and hidden directories stay out.
func mountHostFileSystems(points []string, spec *Spec) error {
	skipped := append([]string{"/proc", "/sys", "/dev", "/run", "/var/run", "/tmp", stage}, spec.HiddenDirs...)
	skipped = append(skipped, spec.Dirs...)
	for _, point := range points {
		if point == "/" || below(point, skipped) {
			continue
		}
		if err := bind(point, newRoot+point, 0); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
			return err
		}
	}
	return nil
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
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

func mountKernelFileSystems() error {
	if err := mount("proc", newRoot+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	// A new sysfs shows the devices of this network namespace.
	if err := mount("sysfs", newRoot+"/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	if err := bind("/sys/fs/cgroup", newRoot+"/sys/fs/cgroup", unix.MS_REC); err != nil {
		return err
	}
	return bind("/dev", newRoot+"/dev", unix.MS_REC)
}

func bindOwnDirs(spec *Spec) error {
	files := filepath.Join(spec.State, FilesDir)
	for _, dir := range spec.Dirs {
		source := filepath.Join(files, dir)
		if err := os.MkdirAll(source, 0o755); err != nil {
			return err
		}
		if err := bind(source, newRoot+dir, 0); err != nil {
			return err
		}
	}
	for _, path := range spec.HostDirs {
		if err := bind(path, newRoot+path, unix.MS_REC); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Chmod(newRoot+"/tmp", 0o777|os.ModeSticky); err != nil {
		return err
	}
	if err := bind(spec.State, newRoot+StateDir, 0); err != nil {
		return err
	}
	return bind(spec.Bin, newRoot+BinDir, 0)
}

// maskSysctls puts plain files over kernel settings that belong to the whole
// host, so that the kubelet may set them without changing the host.
func maskSysctls(spec *Spec) error {
	for key, value := range spec.MaskedSysctls {
		target := filepath.Join(newRoot, "proc/sys", key)
		if _, err := os.Stat(target); errors.Is(err, os.ErrNotExist) {
			continue
		}
		source := filepath.Join(stage, "sysctl", key)
		if err := os.MkdirAll(filepath.Dir(source), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(source, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := bind(source, target, 0); err != nil {
			return err
		}
	}
	return nil
}

// switchRoot makes the new root the machine's root and lets go of the host's.
// Mounts made later spread within the machine, as the kubelet's bidirectional
// volumes need, and never out of it.
func switchRoot() error {
	if err := os.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root to %s: %w", newRoot, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the host's root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	return mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}
