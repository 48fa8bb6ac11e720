package cluster

import (
	"fmt"
	"strings"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
)

// cniDir has the configuration of a node's pod network.
const cniDir = configDir + "/cni"

func containerdUnits(name, repository string) []unit {
	files := map[string]string{}
	for _, program := range []string{"containerd", "containerd-shim-runc-v2", "ctr"} {
		files[program] = repository + program
	}
	return []unit{moduleUnit(name, files)}
}

// snapshotter is overlayfs, or plain copies where the file system can't carry overlays.
func snapshotter(overlay bool) string {
	if overlay {
		return "overlayfs"
	}
	return "native"
}

// containerdConfig renders a node's containerd configuration.
func containerdConfig(o runtimeOptions) string {
	return fmt.Sprintf(`version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = %[1]q

[plugins.'io.containerd.cri.v1.images']
snapshotter = %[2]q

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = %[3]q

[plugins.'io.containerd.cri.v1.runtime']
enable_cdi = true
cdi_spec_dirs = %[6]s
# Without CAP_SYS_RESOURCE runc could not lower a container's score.
restrict_oom_score_adj = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = [%[4]q]
conf_dir = %[7]q
use_internal_loopback = true

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = %[5]q
SystemdCgroup = false
`, o.socket, snapshotter(o.overlay), pauseImage, machine.BinDir, program("runc"), tomlList(o.cdiDirs), cniDir)
}

// oldContainerdConfig is for containerd 1.7, where the Container Device Interface is
// off by default.
func oldContainerdConfig(o runtimeOptions) string {
	return fmt.Sprintf(`version = 2
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = %[1]q

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = %[3]q
enable_cdi = true
cdi_spec_dirs = %[6]s
# Without CAP_SYS_RESOURCE runc could not lower a container's score.
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = %[4]q
conf_dir = %[7]q

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = %[2]q

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = %[5]q
SystemdCgroup = false
`, o.socket, snapshotter(o.overlay), pauseImage, machine.BinDir, program("runc"), tomlList(o.cdiDirs), cniDir)
}

func tomlList(texts []string) string {
	var quoted []string
	for _, text := range texts {
		quoted = append(quoted, fmt.Sprintf("%q", text))
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}
