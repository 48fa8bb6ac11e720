package cdi

import (
	"fmt"
	"os"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// The paths of MPS in a container. The first is CUDA's default, so that a
// process with an empty environment is a client too.
const (
	pipeInContainer = "/tmp/nvidia-mps"
	shmInContainer  = "/dev/shm"
)

// mpsEdits returns the edits for clients of an MPS daemon, with its directories, and their
// limits as in holding.MPS and holding.Record.MemoryLimits. A process can change
// the limits in its environment, but not those of the daemon.
func (s *Specs) mpsEdits(dirs gpu.MPSDirs, threads int, memoryMiB []int64) (specs.ContainerEdits, error) {
	edits := specs.ContainerEdits{Env: []string{"CUDA_MPS_PIPE_DIRECTORY=" + pipeInContainer}}
	if threads > 0 && threads < 100 {
		edits.Env = append(edits.Env, fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", threads))
	}
	if limits := memoryLimits(memoryMiB); limits != "" {
		edits.Env = append(edits.Env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="+limits)
	}
	for _, dir := range []struct{ host, container, access string }{{dirs.PipeDir, pipeInContainer, "ro"}, {dirs.ShmDir, shmInContainer, "rw"}} {
		if dir.host == "" && dir.container == shmInContainer {
			continue
		}
		if info, err := os.Stat(s.cfg.Host.Path(dir.host)); dir.host == "" || err != nil || !info.IsDir() {
			return specs.ContainerEdits{}, fmt.Errorf("directory %q of the MPS daemon doesn't exist on the host: the daemon has just ended, or another program has removed the directory; the next try starts the daemon again (see the MPS supervisor's log)", dir.host)
		}
		edits.Mounts = append(edits.Mounts, &specs.Mount{
			HostPath: dir.host, ContainerPath: dir.container, Options: []string{dir.access, "bind", "nosuid", "nodev", "noexec"},
		})
	}
	return edits, nil
}

// memoryLimits writes "0=1024M,1=2048M": by the daemon's indexes, because MPS
// ignores limits by UUID.
func memoryLimits(mib []int64) string {
	var limits []string
	for i, m := range mib {
		if m > 0 {
			limits = append(limits, fmt.Sprintf("%d=%dM", i, m))
		}
	}
	return strings.Join(limits, ",")
}
