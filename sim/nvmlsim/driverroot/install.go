package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// Options of an installation.
type Options struct {
	// Root is the directory for the driver's files. Install creates it if it is
	// missing.
	Root string
	// Libraries and Programs are directories in Root. Default: LibraryDir, and usr/bin.
	Libraries, Programs string
	// Kernel is the directory whose dev, proc and sys get the device nodes and the
	// kernel's files. Default: Root. Only a machine that is made for it may have "/" here,
	// and then in Root too.
	Kernel string
	// Machine to install.
	Machine nvmlsim.Description
	// Library is the path of the built libnvidia-ml.so.1, see package library.
	Library string
	// SMI is the program that becomes nvidia-smi, the library's engine and the
	// programs of CUDA MPS: a static build of nvmlsim.
	SMI string
}

// Install creates the driver's files. It may be called again at any time:
// correct files stay, others are replaced atomically, files of another driver
// version or of removed GPUs are deleted, and the machine's state is kept
// unless the machine is a different one. Files that GPUs lack (SetMissing) aren't
// made. It needs CAP_MKNOD.
func Install(o Options) error {
	t, err := newTree(o)
	if err != nil {
		return err
	}
	if err := t.checkKernel(); err != nil {
		return err
	}
	entries, err := layout(o, t)
	if err != nil {
		return err
	}
	before, err := readManifest(t.root)
	if err != nil {
		return err
	}
	in := installer{root: t.root, made: before}
	if err := in.announce(entries); err != nil {
		return err
	}
	if err := t.linkKernel(); err != nil {
		return err
	}
	// Create the state before nvidia-smi, which without a state file would assume
	// that it is in a container.
	if err := keepState(t.path(nvmlsim.StateFile), o.Machine); err != nil {
		return err
	}
	if err := in.make(withoutMissing(entries, t.kernel, gpusOf(t.root))); err != nil {
		return err
	}
	return in.prune(entries)
}

// keepState creates the state file, unless it exists with the same machine.
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

// installer creates entries, and adds them to the manifest first.
type installer struct {
	root string
	made manifest
}

// announce adds entries to the manifest before make creates them.
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

// prune removes files of an earlier installation that this one doesn't have.
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

// Uninstall removes the files that Install created under root, and then empty
// directories, including root. Other files stay. Without an installation it
// returns an error.
func Uninstall(root string) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return fmt.Errorf("driver root: %w", err)
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
	kernel := nvmlsim.KernelDir(root)
	if err := remove(kernel, nvmlsim.UnloadedModuleFile); err != nil {
		return err
	}
	for _, path := range []string{nvmlsim.StateFile, nvmlsim.KernelLink, manifestFile} {
		if err := remove(root, path); err != nil {
			return err
		}
	}
	return nil
}

// remove removes a path, and then its empty parent directories up to and
// including the root, but no links to directories.
func remove(root, path string) error {
	full := filepath.Join(root, path)
	if done, err := restore(path, full); done || err != nil {
		return err
	}
	if err := os.Remove(full); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove: %w", err)
	}
	for dir := filepath.Dir(full); len(dir) >= len(root) && dir != "/"; dir = filepath.Dir(dir) {
		if unix.Rmdir(dir) != nil {
			return nil //nolint:nilerr // not empty: there is more to come, or others' files
		}
	}
	return nil
}
