package machine

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// mountOwnDevices gives the machine a /dev of its own, and lets files be added to those
// that the kernel has of drivers and devices.
func mountOwnDevices() error {
	if err := mountOwnDev(); err != nil {
		return err
	}
	if err := mountOwnSys(); err != nil {
		return err
	}
	return mountOwnProc()
}

func mountOwnDev() error {
	if err := mount("tmpfs", "/dev", "tmpfs", unix.MS_NOSUID, "mode=0755"); err != nil {
		return err
	}
	if err := copyDevices(hostRoot+"/dev", "/dev"); err != nil {
		return fmt.Errorf("make the machine's device nodes: %w", err)
	}
	for _, dir := range []string{"/dev/pts", "/dev/shm"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := mount("devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,mode=0620,ptmxmode=0666"); err != nil {
		return err
	}
	if err := mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return err
	}
	return tryDevice("/dev/null")
}

// tryDevice opens a device: a host may have let it be made, and still not let it be used.
func tryDevice(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("this host doesn't let device nodes be used that a machine makes: %w", err)
	}
	return f.Close()
}

// copyDevices makes the device nodes, links and directories of from in to, except those of
// NVIDIA's driver. What is mounted in from is mounted in to.
func copyDevices(from, to string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), "nvidia") {
			continue
		}
		err := copyDevice(filepath.Join(from, entry.Name()), filepath.Join(to, entry.Name()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // the host's device may have gone
			return err
		}
	}
	return nil
}

func copyDevice(from, to string) error {
	var status unix.Stat_t
	if err := unix.Lstat(from, &status); err != nil {
		return err
	}
	switch status.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return copyDeviceDir(from, to)
	case unix.S_IFLNK:
		return copyDeviceLink(from, to)
	case unix.S_IFCHR, unix.S_IFBLK:
		if err := unix.Mknod(to, status.Mode, int(status.Rdev)); err != nil {
			return fmt.Errorf("make the device node %s, which this host may not allow: %w", to, err)
		}
		return copyOwner(to, &status)
	}
	return nil // programs of the host make files, sockets and pipes
}

func copyDeviceDir(from, to string) error {
	mounted, err := isMountPoint(from)
	if err != nil {
		return err
	}
	switch {
	case to == "/dev/pts" || to == "/dev/shm":
		return nil
	case mounted:
		return bind(from, to, unix.MS_REC)
	}
	if err := mkdirLike(to, from); err != nil {
		return err
	}
	return copyDevices(from, to)
}

func copyDeviceLink(from, to string) error {
	target, err := os.Readlink(from)
	if err != nil || strings.HasPrefix(filepath.Base(target), "nvidia") {
		return err
	}
	return os.Symlink(target, to)
}

func mountOwnSys() error {
	// Network devices come and go there, which an overlay would hide.
	virtual := scratch("virtual")
	if err := bind("/sys/devices/virtual", virtual, 0); err != nil {
		return err
	}
	for _, dir := range []string{"/sys/devices", "/sys/bus/pci/devices", "/sys/module"} {
		// A kernel without PCI has only some of the parents.
		have := dir
		for !exists(have) {
			have = filepath.Dir(have)
		}
		if err := coverWithOverlay(have, scratch("")); err != nil {
			return err
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return bind(virtual, "/sys/devices/virtual", 0)
}

func mountOwnProc() error {
	if err := mount("tmpfs", "/proc/driver", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755"); err != nil {
		return err
	}
	devices, err := os.ReadFile("/proc/devices")
	if err != nil {
		return err
	}
	var kept []byte
	for line := range bytes.Lines(devices) {
		if !bytes.Contains(line, []byte("nvidia")) {
			kept = append(kept, line...)
		}
	}
	return replaceFile("/proc/devices", kept)
}
