package nvmlsim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// The directory of the kernel module in sysfs, under the KernelDir of a driver root, and its name
// while the module isn't loaded. Keeping the old directory until there is a new
// one makes the inode number of each load a different one, as in sysfs.
const (
	moduleDir   = "sys/module/nvidia"
	unloadedDir = "sys/module/.nvidia-unloaded"

	// ModuleFile and UnloadedModuleFile are the only files of these directories.
	ModuleFile         = moduleDir + "/version"
	UnloadedModuleFile = unloadedDir + "/version"
)

// removeModule removes the module's directory, if there is one.
func (m *Machine) removeModule() error {
	dir := m.kernelDir()
	if dir == "" {
		return nil
	}
	if err := os.RemoveAll(filepath.Join(dir, unloadedDir)); err != nil {
		return fmt.Errorf("unload the driver: %w", err)
	}
	err := os.Rename(filepath.Join(dir, moduleDir), filepath.Join(dir, unloadedDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unload the driver: %w", err)
	}
	return nil
}

// addModule creates the module's directory; in WSL there is none.
func (m *Machine) addModule(d Description) error {
	dir := m.kernelDir()
	if dir == "" || d.WSL {
		return nil
	}
	if err := os.MkdirAll(filepath.Join(dir, moduleDir), 0o755); err != nil {
		return fmt.Errorf("load the driver: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, ModuleFile), []byte(d.DriverVersion+"\n"), 0o444); err != nil {
		return fmt.Errorf("load the driver: %w", err)
	}
	if err := os.RemoveAll(filepath.Join(dir, unloadedDir)); err != nil {
		return fmt.Errorf("load the driver: %w", err)
	}
	return nil
}
