package driverroot

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/lookup"
)

// library is the file by which a driver root is recognized.
const library = "libnvidia-ml.so.1"

// Root is an NVIDIA driver's user space on a host. All paths are paths of the
// host.
type Root struct {
	// Path is the directory of the driver's files: "/" if it is installed in the
	// host itself.
	Path string
	// DevRoot has the device nodes in its dev directory.
	DevRoot string
	// SysRoot has the kernel's view of the PCI devices in its sys directory.
	SysRoot string
	// ProcRoot has the files of the driver's kernel modules in its proc directory:
	// /proc/driver/nvidia, and /proc/devices for their device numbers.
	ProcRoot string
	// Library is the path of libnvidia-ml.so.1, with links resolved.
	Library string
	// LibraryDirs has the directories to search for libraries in addition to the
	// usual ones; usually empty.
	LibraryDirs []string
}

// Candidates returns the directories to search for a driver if none is
// configured.
func Candidates() []string {
	return []string{
		"/",                           // installed in the host
		"/run/nvidia/driver",          // NVIDIA GPU Operator's driver container
		"/home/kubernetes/bin/nvidia", // Google Kubernetes Engine
	}
}

// NotFoundError means that the host has no driver, or not yet.
type NotFoundError struct {
	// Looked has the driver roots that were tried.
	Looked []string
	// Asked is true if the only one was set with --driver-root.
	Asked bool
}

func (e *NotFoundError) Error() string {
	where := strings.Join(e.Looked, ", ")
	// The toolkit doesn't export the usual ones.
	dirs := "/usr/lib64, /usr/lib/x86_64-linux-gnu and other usual directories, those of ld.so.cache, and " + strings.Join(libraryDirs("/"), ", ")
	if e.Asked {
		return fmt.Sprintf("no NVIDIA driver at the --driver-root %s: it has no %s (searched below it: %s); correct the flag, or wait for the driver's installation to end",
			where, library, dirs)
	}
	return fmt.Sprintf("no NVIDIA driver on this host: no %s under %s (searched below each: %s); install the driver, or say where it is with --driver-root",
		library, where, dirs)
}

// Find searches for the driver, only at path unless that is empty, and returns
// a NotFoundError if there is none. It may be called repeatedly: drivers
// appear, move and disappear while a node runs.
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

// inspect returns a root without a library if the candidate isn't a driver
// root.
func inspect(candidate string) Root {
	root := inspectTree(candidate)
	if own := root.ownTree(); own != "" {
		if inner := inspectTree(own); inner.Library == root.Library {
			return inner
		}
	}
	return root
}

// ownTree returns the directory of a driver that has a directory tree of its
// own, such as /usr/local/nvidia with lib64 and bin, instead of files in the
// root's usual directories: nvidia-smi there belongs to the library, while an
// nvidia-smi elsewhere may not. It returns "" otherwise.
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
	// Resolve links, because the libraries below are resolved too.
	path, err := filepath.EvalSymlinks(candidate)
	if err != nil {
		return Root{}
	}
	root := Root{Path: path, DevRoot: "/", SysRoot: "/", ProcRoot: "/"}
	if !root.findLibrary() {
		return Root{}
	}
	if isCharDevice(filepath.Join(path, "dev/nvidiactl")) || isCharDevice(filepath.Join(path, "dev/dxg")) {
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
	for _, dir := range libraryDirs(r.Path) {
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

// silent drops the toolkit's messages about every searched directory: the
// search is repeated while a driver is being installed.
type silent struct{}

func (silent) Debugf(string, ...any)   {}
func (silent) Errorf(string, ...any)   {}
func (silent) Infof(string, ...any)    {}
func (silent) Warningf(string, ...any) {}
func (silent) Tracef(string, ...any)   {}
