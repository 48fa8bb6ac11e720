package cdi

import (
	"os"
	"path/filepath"
	"slices"

	specs "tags.cncf.io/container-device-interface/specs-go"
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
		for _, dir := range dirs {
			path, err := filepath.EvalSymlinks(filepath.Join(dir, name))
			if err != nil {
				continue
			}
			if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
				continue
			}
			edits.Mounts = append(edits.Mounts, &specs.Mount{
				HostPath: path, ContainerPath: filepath.Join("/usr/bin", name), Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
			})
			break
		}
	}
}
