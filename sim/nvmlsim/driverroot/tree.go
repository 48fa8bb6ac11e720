package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// tree has the directories of an installation.
type tree struct {
	root string // absolute
	// The others are relative to the root. That of the kernel's files leads through
	// nvmlsim.KernelLink unless it is the root.
	libraries, programs, kernel string
	// kernelTarget is the directory that the link leads to; "": there is no link.
	kernelTarget string
}

func newTree(o Options) (tree, error) {
	root, err := filepath.Abs(o.Root)
	if err != nil {
		return tree{}, fmt.Errorf("driver root: %w", err)
	}
	if o.Root == "" || root == "/" && o.Kernel == "" {
		return tree{}, errors.New("driver root must be a separate directory, not /, unless the device nodes and the kernel's files go to / too (--kernel /)")
	}
	libraries, programs := usualDirs(o.Machine)
	t := tree{root: root, libraries: below(o.Libraries, libraries), programs: below(o.Programs, programs)}
	if o.Kernel != "" {
		if t.kernelTarget, err = filepath.Abs(o.Kernel); err != nil {
			return tree{}, fmt.Errorf("directory of the kernel's files: %w", err)
		}
	}
	if realPath(root) == "/" || realPath(t.kernelTarget) == "/" {
		if err := mayChangeMachine(); err != nil {
			return tree{}, err
		}
	}
	if realPath(t.kernelTarget) == realPath(root) {
		t.kernelTarget = ""
	}
	if t.kernelTarget != "" {
		t.kernel = nvmlsim.KernelLink
	}
	return t, nil
}

// usualDirs returns where a machine's driver has its libraries and programs.
func usualDirs(d nvmlsim.Description) (libraries, programs string) {
	if d.WSL {
		return wslDir, wslDir
	}
	return LibraryDir(), "usr/bin"
}

// below returns a directory relative to the root.
func below(dir, otherwise string) string {
	if dir == "" {
		dir = otherwise
	}
	return filepath.Join("/", dir)[1:]
}

func (t tree) path(path string) string { return filepath.Join(t.root, path) }

// relative returns the path from one directory of the tree to another, without links.
func (t tree) relative(from, to string) (string, error) {
	return filepath.Rel(realPath(t.path(from)), realPath(t.path(to)))
}

// firmwareDirs returns the directories, relative to the root, whose lib/firmware is
// searched for firmware: the root, and that of a driver with lib and bin directories of its
// own, which programs take for the driver root.
func (t tree) firmwareDirs() ([]string, error) {
	root := realPath(t.root)
	own := filepath.Dir(realPath(t.path(t.libraries)))
	if own == root || own == filepath.Join(root, "usr") || realPath(t.path(t.programs)) != filepath.Join(own, "bin") {
		return []string{""}, nil
	}
	dir, err := filepath.Rel(root, own)
	return []string{"", dir}, err
}

// linkKernel makes the link to the kernel's files. With another target its files would
// be lost sight of.
func (t tree) linkKernel() error {
	if t.kernelTarget == "" {
		return nil
	}
	if err := os.MkdirAll(t.kernelTarget, 0o755); err != nil {
		return fmt.Errorf("directory of the kernel's files: %w", err)
	}
	target, err := filepath.Rel(realPath(filepath.Dir(t.path(nvmlsim.KernelLink))), realPath(t.kernelTarget))
	if err != nil {
		return fmt.Errorf("directory of the kernel's files: %w", err)
	}
	l := link(nvmlsim.KernelLink, target)
	return l.put(t.path(l.path))
}

// checkKernel returns an error if the driver is installed with the kernel's files
// elsewhere.
func (t tree) checkKernel() error {
	if _, err := os.Stat(t.path(manifestFile)); err != nil {
		return nil //nolint:nilerr // it isn't installed
	}
	before := realPath(nvmlsim.KernelDir(t.root))
	if before == realPath(t.kernelTarget) || t.kernelTarget == "" && before == realPath(t.root) {
		return nil
	}
	return fmt.Errorf("the driver under %s is installed with device nodes and the kernel's files in %s: uninstall it first", t.root, before)
}

// realPath resolves links in a path whose end needn't exist.
func realPath(path string) string {
	if path == "" {
		return ""
	}
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		return resolved
	}
	if dir := filepath.Dir(path); dir != path {
		return filepath.Join(realPath(dir), filepath.Base(path))
	}
	return path
}

// mayChangeMachine returns an error unless this is a machine of tests, with files of its
// own in /proc/driver, and without a GPU's driver.
func mayChangeMachine() error {
	var st unix.Statfs_t
	if err := unix.Statfs("/proc/driver", &st); err != nil || st.Type == unix.PROC_SUPER_MAGIC {
		return errors.New("the driver's files go into / only on a machine that is made for it: this one's /proc/driver is the kernel's own")
	}
	// A directory of the simulator's has no such file.
	if _, err := os.Stat("/sys/module/nvidia/initstate"); !errors.Is(err, fs.ErrNotExist) {
		return errors.New("the driver's files go into / only on a machine without an NVIDIA driver: this one has the kernel module nvidia")
	}
	return nil
}
