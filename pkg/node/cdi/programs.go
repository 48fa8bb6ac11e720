package cdi

import (
	"path/filepath"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// programs are those of the driver that nvcdi gives a container.
func programs() []string {
	return []string{
		"nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-imex", "nvidia-imex-ctl",
	}
}

// addPrograms adds the programs that nvcdi hasn't found, because it searches only the usual
// directories. In a container they are in /usr/bin: their directory of the host is in no
// container's PATH. It runs inside Host.Do, where / is the host's root.
func addPrograms(edits *specs.ContainerEdits, dirs []string) {
	for _, name := range programs() {
		if slices.ContainsFunc(edits.Mounts, func(m *specs.Mount) bool { return filepath.Base(m.ContainerPath) == name }) {
			continue
		}
		found := driverroot.Locate(dirs, name)
		if found == "" {
			continue
		}
		path, err := filepath.EvalSymlinks(found)
		if err != nil {
			continue // it has gone since
		}
		edits.Mounts = append(edits.Mounts, &specs.Mount{
			HostPath: path, ContainerPath: filepath.Join("/usr/bin", name), Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
		})
	}
}
