package driverroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// SetMissing takes away the device node of a GPU, by position, and the files with the
// capabilities of its MIG instances, or makes them again. Those that are missing stay
// so when the driver is installed again. It needs CAP_MKNOD to make a node.
func SetMissing(m *nvmlsim.Machine, gpu int, node, capabilities bool) error {
	root, ok := strings.CutSuffix(m.StatePath(), "/"+nvmlsim.StateFile)
	if !ok || m.Description().WSL {
		return errors.New("the machine has no device nodes: it isn't installed in a driver root, or is one of WSL")
	}
	err := m.ChangeGPU(gpu, func(g *nvmlsim.GPUState) error {
		g.NodeMissing, g.CapabilitiesMissing = node, capabilities
		return nil
	})
	if err != nil {
		return err
	}
	of := nvmlsim.GPUState{
		Minor: m.State().GPUs[gpu].Minor, Health: nvmlsim.Health{NodeMissing: true, CapabilitiesMissing: true},
	}
	entries := slices.Concat(deviceEntries(m.Description()), procEntries(m.Description()))
	entries = slices.DeleteFunc(entries, func(e entry) bool { return !missing(e.path, []nvmlsim.GPUState{of}) })
	for _, e := range withoutMissing(entries, "", m.State().GPUs) {
		if err := e.put(filepath.Join(nvmlsim.KernelDir(root+"/"), e.path)); err != nil {
			return err
		}
	}
	return nil
}

// missing reports whether one of the GPUs lacks the file at this path of the kernel's files.
func missing(path string, gpus []nvmlsim.GPUState) bool {
	return slices.ContainsFunc(gpus, func(g nvmlsim.GPUState) bool {
		return g.NodeMissing && path == fmt.Sprintf("dev/nvidia%d", g.Minor) ||
			g.CapabilitiesMissing && strings.HasPrefix(path, fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/", g.Minor))
	})
}

// withoutMissing returns the entries, of which those that GPUs lack remove their files.
// kernel is the directory of the kernel's files in the entries' paths.
func withoutMissing(entries []entry, kernel string, gpus []nvmlsim.GPUState) []entry {
	for i, e := range entries {
		if missing(strings.TrimPrefix(e.path, kernel+"/"), gpus) {
			entries[i].put = removeFile
		}
	}
	return entries
}

func removeFile(full string) error {
	if err := os.Remove(full); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// gpusOf returns the state of the GPUs of a driver root, nil if it can't be read.
func gpusOf(root string) []nvmlsim.GPUState {
	m, err := nvmlsim.Open(filepath.Join(root, nvmlsim.StateFile))
	if err != nil {
		return nil
	}
	defer m.Close()
	if s := m.State(); s != nil {
		return s.GPUs
	}
	return nil
}
