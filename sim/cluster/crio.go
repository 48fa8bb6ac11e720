package cluster

import (
	"fmt"
	"os"

	"github.com/tessera-dra/tessera/sim/cluster/machine"
)

// Where CRI-O has images and containers.
const (
	crioRoot    = "/var/lib/containers/storage"
	crioRunRoot = "/run/containers/storage"
)

// conmonPath is the program that Debian's package installs. CRI-O has it watch each container.
const conmonPath = "/usr/bin/conmon"

func crio() containerRuntime {
	dir := "sim/cluster/crio"
	return containerRuntime{
		component: "crio", socket: "/var/run/crio/crio.sock",
		dirs:   []string{"/var/lib/containers", "/var/lib/crio", "/var/log/crio"},
		config: crioConfig,
		units: []unit{{
			name: "crio", dir: dir, sources: []string{dir, dir + "/runc"}, cgo: true,
			files: map[string]string{"crio": "github.com/cri-o/cri-o/cmd/crio", "crio-import": ".", "crio-runc": "./runc"},
			// Without the C libraries that most features of image stores need.
			flags: []string{
				"-tags=seccomp,netgo,osusergo,containers_image_openpgp,exclude_graphdriver_btrfs",
				strip + " -linkmode external -extldflags -static",
			},
			sourcesInC: map[string]string{"pinns": "github.com/cri-o/cri-o/pinns/src"},
			note:       "about 8 minutes on 2 cores",
		}},
		packages: []need{{"conmon", func() bool { _, err := os.Stat(conmonPath); return err == nil }}},
		importing: func(overlay bool) []string {
			return []string{"crio-import", crioRoot, crioRunRoot, crioStorage(overlay), "/dev/stdin"}
		},
	}
}

func crioStorage(overlay bool) string {
	if overlay {
		return "overlay"
	}
	return "vfs"
}

// crioConfig renders a node's CRI-O configuration. Monitors are in the pods' cgroups, as on
// OpenShift. A machine that is switched off keeps its images: CRI-O would remove them if it
// looked for a mark of its own orderly end.
func crioConfig(o runtimeOptions) string {
	return fmt.Sprintf(`[crio]
root = %[1]q
runroot = %[2]q
storage_driver = %[3]q
clean_shutdown_file = ""

[crio.api]
listen = %[4]q

[crio.runtime]
cgroup_manager = "cgroupfs"
default_runtime = "runc"
cdi_spec_dirs = %[5]s
pinns_path = %[6]q
hooks_dir = []
# As containerd has them: tests make device nodes, to see what the cgroup lets them open.
default_capabilities = [
  "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
  "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
]
enable_criu_support = false
irqbalance_config_restore_file = "disable"
# It would need iptables.
disable_hostport_mapping = true

[crio.runtime.runtimes.runc]
runtime_path = %[7]q
runtime_type = "oci"
runtime_root = "/run/runc"
monitor_path = %[8]q
monitor_cgroup = "pod"

[crio.image]
pause_image = %[9]q
pause_command = ""
signature_policy = %[10]q

[crio.network]
network_dir = %[11]q
plugin_dirs = [%[12]q]

[crio.nri]
enable_nri = false
`, crioRoot, crioRunRoot, crioStorage(o.overlay), o.socket, tomlList(o.cdiDirs), program("pinns"), program("crio-runc"), conmonPath,
		pauseImage, configDir+"/"+crioPolicyFile, cniDir, machine.BinDir)
}

// crioPolicy has CRI-O use images without a signature.
const (
	crioPolicyFile = "image-policy.json"
	crioPolicy     = `{"default": [{"type": "insecureAcceptAnything"}]}` + "\n"
)
