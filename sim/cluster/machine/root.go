package machine

import (
	"fmt"
	"os"
	"path/filepath"

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

// hostName is the directory of the new root where the host's root is while the machine is
// set up: from there on all paths are those of the machine, and links lead where they lead
// in the machine.
const (
	hostName = ".localcluster-host"
	hostRoot = "/" + hostName
)

// root is a machine's file system view while it is made.
type root struct {
	spec   *Spec
	mounts []string // what the host has mounted
	state  string   // spec.State and spec.Bin without links
	bin    string
}

// mountRoot gives the machine its own view of the host: the host's root file
// system under an overlay that takes all writes and vanishes with the machine,
// own directories and mounts where the spec wants them, own /proc, /sys and /run.
func mountRoot(spec *Spec) error {
	r, err := newRootOf(spec)
	if err != nil {
		return err
	}
	steps := []func() error{
		func() error { return mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		r.mountOverlay,
		r.enter,
		r.mountKernelFileSystems,
		r.mountPlaces,
		mountUncovered,
		r.maskSysctls,
		r.disableUnmounted,
		r.makeViews,
		r.leaveHost,
		r.setOptions,
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("set up the machine's file systems: %w", err)
		}
	}
	return nil
}

func newRootOf(spec *Spec) (*root, error) {
	r := &root{spec: spec}
	var err error
	if r.mounts, err = hostMounts("/proc/self/mountinfo"); err != nil {
		return nil, err
	}
	if r.state, err = filepath.EvalSymlinks(spec.State); err != nil {
		return nil, fmt.Errorf("find the machine's state: %w", err)
	}
	if r.bin, err = filepath.EvalSymlinks(spec.Bin); err != nil {
		return nil, fmt.Errorf("find the machine's programs: %w", err)
	}
	return r, nil
}

// mountOverlay mounts the host's root below an upper layer in a tmpfs. That can't lie
// on the host's root itself: overlayfs refuses layers inside each other.
func (r *root) mountOverlay() error {
	if err := mount("tmpfs", stage, "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	for _, dir := range []string{newRoot, upperDir, workDir, filepath.Join(upperDir, hostName)} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := r.linkBelow(); err != nil {
		return err
	}
	options := fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s,redirect_dir=follow", upperDir, workDir)
	return mount("overlay", newRoot, "overlay", 0, options)
}

// enter makes the new root the machine's root. The host's stays below it until leaveHost.
func (r *root) enter() error {
	if err := unix.PivotRoot(newRoot, filepath.Join(newRoot, hostName)); err != nil {
		return fmt.Errorf("pivot_root to %s: %w", newRoot, err)
	}
	return os.Chdir("/")
}

// leaveHost lets go of the host's root. Mounts made later spread within the machine, as
// the kubelet's bidirectional volumes need, and never out of it.
func (r *root) leaveHost() error {
	if err := unix.Unmount(hostRoot, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the host's root: %w", err)
	}
	if err := os.Remove(hostRoot); err != nil {
		return err
	}
	return mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

// scratch is a directory that only mounts refer to once the host's root is left.
func scratch(name string) string { return filepath.Join(hostRoot, stage, name) }

// mountKernelFileSystems needs no other step of the machine but enter.
func (r *root) mountKernelFileSystems() error {
	if err := mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	// A new sysfs shows the devices of this network namespace.
	if err := mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	if err := bind(hostRoot+"/sys/fs/cgroup", "/sys/fs/cgroup", unix.MS_REC); err != nil {
		return err
	}
	if r.spec.OwnDevices {
		return mountOwnDevices()
	}
	return bind(hostRoot+"/dev", "/dev", unix.MS_REC)
}

// uncoveredDir has a proc and a sysfs in which nothing is covered. No program uses them: they are
// there for the kernel, which doesn't let a container in a user namespace mount these file systems
// if parts of all those are covered that are mounted where the container was started.
const uncoveredDir = StateDir + "/uncovered"

func mountUncovered() error {
	for _, fstype := range []string{"proc", "sysfs"} {
		target := filepath.Join(uncoveredDir, fstype)
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		if err := mount(fstype, target, fstype, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return err
		}
	}
	return nil
}

// maskSysctls puts plain files over kernel settings that belong to the whole
// host, so that the kubelet may set them without changing the host.
func (r *root) maskSysctls() error {
	for key, value := range r.spec.MaskedSysctls {
		target := filepath.Join("/proc/sys", key)
		if _, err := os.Stat(target); os.IsNotExist(err) {
			continue
		}
		if err := replaceFile(target, []byte(value+"\n")); err != nil {
			return err
		}
	}
	return nil
}

// replaceFile mounts a plain file with the given contents over a file of the kernel.
func replaceFile(path string, contents []byte) error {
	source := scratch(filepath.Join("replaced", path))
	if err := os.MkdirAll(filepath.Dir(source), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(source, contents, 0o644); err != nil {
		return err
	}
	return bind(source, path, 0)
}
