package driverroot

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/lookup"
)

// library is what makes a directory a driver root.
const library = "libnvidia-ml.so.1"

// Root is an NVIDIA driver's user space on a host. All paths are the host's.
type Root struct {
	// Path that the driver's files lie under: "/" where it is installed in the
	// host itself.
	Path string
	// DevRoot has the device nodes in its dev directory.
	DevRoot string
	// SysRoot has the kernel's view of the PCI devices in its sys directory.
	SysRoot string
	// ProcRoot has what the driver's kernel modules tell in its proc directory:
	// /proc/driver/nvidia, and /proc/devices for their device numbers.
	ProcRoot string
	// Library is libnvidia-ml.so.1, links resolved.
	Library string
	// LibraryDirs has what must be searched beyond the usual places for the
	// libraries to be found; usually empty.
	LibraryDirs []string
}

// Candidates are where a driver is looked for when nobody says where it is.
func Candidates() []string {
	return []string{
		"/",                           // installed in the host
		"/run/nvidia/driver",          // NVIDIA GPU Operator's driver container
		"/home/kubernetes/bin/nvidia", // Google Kubernetes Engine
	}
}

// extraLibraryDirs are directories below a driver root that the toolkit's own
// search doesn't know.
func extraLibraryDirs() []string {
	return []string{"/usr/lib", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/lib"}
}

// NotFoundError says that the host has no driver (yet).
type NotFoundError struct {
	// Looked are the driver roots that were tried.
	Looked []string
	// Asked says that the only one was given by --driver-root.
	Asked bool
}

func (e *NotFoundError) Error() string {
	where := strings.Join(e.Looked, ", ")
	if e.Asked {
		return fmt.Sprintf("no NVIDIA driver at the --driver-root %s: it has no %s; correct the flag, or wait for the driver's installation to end",
			where, library)
	}
	return fmt.Sprintf("no NVIDIA driver on this host: no %s under %s; install the driver, or say where it is with --driver-root",
		library, where)
}

// Find looks for the driver, at path alone unless that is empty, and fails
// with a NotFoundError while there is none. It may be called again and again:
// drivers appear, move and disappear while a node runs.
func Find(h Host, path string) (Root, error) {
	looked := Candidates()
	if path != "" {
		looked = []string{filepath.Clean(path)}
	}
	var root Root
	err := h.Do(func() error {
		for _, candidate := range looked {
			if root = inspect(candidate); root.Library != "" {
				return nil
			}
		}
		return &NotFoundError{Looked: looked, Asked: path != ""}
	})
	return root, err
}

// inspect returns a root without a library where the candidate isn't one.
func inspect(candidate string) Root {
	root := inspectTree(candidate)
	if own := root.ownTree(); own != "" {
		if inner := inspectTree(own); inner.Library == root.Library {
			return inner
		}
	}
	return root
}

// ownTree returns the directory of a driver that was not spread over the root's
// usual directories but lies in a tree of its own, such as /usr/local/nvidia
// with lib64 and bin: nvidia-smi is found there with the library it belongs to,
// while a program of that name elsewhere may be anything. Empty otherwise.
func (r *Root) ownTree() string {
	own := filepath.Dir(filepath.Dir(r.Library))
	if r.Library == "" || own == r.Path || own == filepath.Join(r.Path, "usr") {
		return ""
	}
	if _, err := os.Stat(filepath.Join(own, "bin/nvidia-smi")); err != nil {
		return ""
	}
	return own
}

func inspectTree(candidate string) Root {
	// Links are resolved, since the libraries below will be.
	path, err := filepath.EvalSymlinks(candidate)
	if err != nil {
		return Root{}
	}
	root := Root{Path: path, DevRoot: "/", SysRoot: "/", ProcRoot: "/"}
	if !root.findLibrary() {
		return Root{}
	}
	if isCharDevice(filepath.Join(path, "dev/nvidiactl")) {
		root.DevRoot = path
	}
	if _, err := os.Stat(filepath.Join(path, "sys/bus/pci/devices")); err == nil {
		root.SysRoot = path
	}
	if _, err := os.Stat(filepath.Join(path, "proc/driver/nvidia")); err == nil {
		root.ProcRoot = path
	}
	return root
}

func (r *Root) findLibrary() bool {
	usual := lookup.NewLibraryLocator(lookup.WithRoot(r.Path), lookup.WithLogger(silent{}))
	if found, err := usual.Locate(library); err == nil && len(found) > 0 {
		r.Library = found[0]
		return true
	}
	for _, dir := range extraLibraryDirs() {
		dir = filepath.Join(r.Path, dir)
		if resolved, err := filepath.EvalSymlinks(filepath.Join(dir, library)); err == nil {
			r.Library, r.LibraryDirs = resolved, []string{dir}
			return true
		}
	}
	return false
}

func isCharDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&fs.ModeCharDevice != 0
}

// silent keeps the toolkit's remarks on every directory it looks into out of
// the log: the search is repeated while a driver is being installed.
type silent struct{}

func (silent) Debugf(string, ...any)   {}
func (silent) Errorf(string, ...any)   {}
func (silent) Infof(string, ...any)    {}
func (silent) Warningf(string, ...any) {}
func (silent) Tracef(string, ...any)   {}
