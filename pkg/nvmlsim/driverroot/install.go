package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"

	"github.com/tessera-dra/tessera/pkg/nvmlsim"
)

// Options of an installation.
type Options struct {
	// Root is the directory the driver is laid out under; made if missing. Not "/".
	Root string
	// Machine to install.
	Machine nvmlsim.Description
	// Library is the built libnvidia-ml.so.1, see package library.
	Library string
	// SMI is the program that becomes nvidia-smi, the library's engine and the
	// programs of CUDA MPS: a static build of nvmlsim.
	SMI string
}

// Install lays the driver out. It may be run again at any time: what is right
// already is left alone, files are replaced in one step, those of another driver
// version or of GPUs that are gone are removed, and the state of the machine is
// kept unless the machine is another one. It needs CAP_MKNOD.
func Install(o Options) error {
	root, err := checkRoot(o.Root)
	if err != nil {
		return err
	}
	entries, err := layout(o)
	if err != nil {
		return err
	}
	before, err := readManifest(root)
	if err != nil {
		return err
	}
	in := installer{root: root, made: before}
	if err := in.announce(entries); err != nil {
		return err
	}
	// Before nvidia-smi, which without it would take the root for a container.
	if err := keepState(filepath.Join(root, nvmlsim.StateFile), o.Machine); err != nil {
		return err
	}
	if err := in.make(entries); err != nil {
		return err
	}
	return in.prune(entries)
}

func checkRoot(root string) (string, error) {
	abs, err := filepath.Abs(root)
	if err != nil {
		return "", fmt.Errorf("driver root: %w", err)
	}
	if root == "" || abs == "/" {
		return "", errors.New("driver root must be a directory of its own, not /")
	}
	return abs, nil
}

// keepState makes the state file, unless it is there with the same machine.
func keepState(path string, d nvmlsim.Description) error {
	m, err := nvmlsim.Open(path)
	if err == nil {
		same := reflect.DeepEqual(m.Description(), d)
		if err := m.Close(); err != nil {
			return err
		}
		if same {
			return nil
		}
	}
	if m, err = nvmlsim.Create(path, d); err != nil {
		return err
	}
	return m.Close()
}

// installer makes entries and keeps the manifest ahead of them.
type installer struct {
	root string
	made manifest
}

// announce writes down what make is going to make.
func (in *installer) announce(entries []entry) error {
	if err := os.MkdirAll(filepath.Dir(filepath.Join(in.root, manifestFile)), 0o755); err != nil {
		return fmt.Errorf("driver root: %w", err)
	}
	for _, e := range entries {
		in.made.add(e.path)
	}
	return in.made.write(in.root)
}

func (in *installer) make(entries []entry) error {
	for _, e := range entries {
		path := filepath.Join(in.root, e.path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("install %s: %w", path, err)
		}
		if err := e.put(path); err != nil {
			return fmt.Errorf("install %s: %w", path, err)
		}
	}
	return nil
}

// prune removes what an earlier installation made and this one has not.
func (in *installer) prune(entries []entry) error {
	wanted := map[string]bool{nvmlsim.StateFile: true}
	for _, e := range entries {
		wanted[e.path] = true
	}
	kept := manifest{}
	for path := range in.made {
		if wanted[path] {
			kept.add(path)
		} else if err := remove(in.root, path); err != nil {
			return err
		}
	}
	return kept.write(in.root)
}

// Uninstall removes what Install made under root, and then the directories
// that are empty, root among them. What others put there stays. Without an
// installation it is an error that says so.
func Uninstall(root string) error {
	root, err := checkRoot(root)
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(root, manifestFile)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no simulated driver is installed under %s", root)
	}
	made, err := readManifest(root)
	if err != nil {
		return err
	}
	for path := range made {
		if err := remove(root, path); err != nil {
			return err
		}
	}
	for _, path := range []string{nvmlsim.StateFile, manifestFile} {
		if err := remove(root, path); err != nil {
			return err
		}
	}
	return nil
}

// remove removes a path and the directories above it that are empty then, up
// to and including the root.
func remove(root, path string) error {
	full := filepath.Join(root, path)
	if err := os.Remove(full); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove: %w", err)
	}
	for dir := filepath.Dir(full); len(dir) >= len(root); dir = filepath.Dir(dir) {
		if os.Remove(dir) != nil {
			return nil //nolint:nilerr // not empty: there is more to come, or others' files
		}
	}
	return nil
}
