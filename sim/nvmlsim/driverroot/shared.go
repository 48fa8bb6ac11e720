package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

const devicesFile = "proc/devices"

// restore undoes the change of a file that may be the machine's own, and reports whether it
// is one of these two. path is relative to the root.
func restore(path, full string) (done bool, err error) {
	for _, shared := range []struct {
		path string
		undo func(full string) (bool, error)
	}{
		{devicesFile, dropDriverNumbers},
		{nvmlsim.KernelLogFile, restoreKernelLog},
	} {
		if path == shared.path || path == nvmlsim.KernelLink+"/"+shared.path {
			return shared.undo(full)
		}
	}
	return false, nil
}

// keptLog is added to the name of the machine's own kernel log.
const keptLog = ".kernel"

// kernelLog returns an entry for the kernel log, which keeps its content. It replaces
// the machine's own, which can't be written in the right format.
func kernelLog() entry {
	return entry{nvmlsim.KernelLogFile, func(full string) error {
		if info, err := os.Lstat(full); err == nil && !info.Mode().IsRegular() {
			if err := os.Rename(full, full+keptLog); err != nil {
				return err
			}
		}
		f, err := os.OpenFile(full, os.O_WRONLY|os.O_CREATE, 0o644)
		if err != nil {
			return err
		}
		return f.Close()
	}}
}

func restoreKernelLog(full string) (bool, error) {
	err := os.Rename(full+keptLog, full)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return true, err
}

// emptyDevices is /proc/devices of a driver root without the driver's lines.
const emptyDevices = "Character devices:\n  1 mem\n\nBlock devices:\n"

func driverNumbers() []string {
	var lines []string
	for _, d := range []struct {
		major int
		name  string
	}{{nvidiaMajor, "nvidia"}, {nvidiaMajor, "nvidia-modeset"}, {nvidiaMajor, "nvidiactl"}, {capsMajor, "nvidia-caps"}, {uvmMajor, "nvidia-uvm"}} {
		lines = append(lines, fmt.Sprintf("%3d %s\n", d.major, d.name))
	}
	return lines
}

// withoutNumbers returns the content of /proc/devices without the driver's lines.
func withoutNumbers(content string) string {
	lines := slices.Collect(strings.Lines(content))
	return strings.Join(slices.DeleteFunc(lines, func(l string) bool { return slices.Contains(driverNumbers(), l) }), "")
}

// devices returns an entry for /proc/devices: the driver's lines in an existing file, or a
// file with these.
func devices() entry {
	return entry{devicesFile, func(full string) error {
		old, err := os.ReadFile(full)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		others := withoutNumbers(string(old))
		if err != nil || others == emptyDevices {
			return replace(full, []byte(withNumbers(emptyDevices)), 0o444)
		}
		return overwrite(full, string(old), withNumbers(others))
	}}
}

func withNumbers(others string) string {
	characters, blocks, _ := strings.Cut(others, "\n\n")
	return strings.TrimSuffix(characters, "\n") + "\n" + strings.Join(driverNumbers(), "") + "\n" + blocks
}

func dropDriverNumbers(full string) (bool, error) {
	old, err := os.ReadFile(full)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return true, err
	}
	others := withoutNumbers(string(old))
	if others == emptyDevices {
		return false, nil
	}
	return true, overwrite(full, string(old), others)
}

// overwrite writes a file that can't be replaced, since something may be mounted there.
func overwrite(full, old, content string) error {
	if old == content {
		return nil
	}
	f, err := os.OpenFile(full, os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Truncate(int64(len(content))), f.Close())
}
