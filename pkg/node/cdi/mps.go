package cdi

import (
	"fmt"
	"os"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Where a container finds its MPS daemon. The first is CUDA's default, so that a
// process which starts with an empty environment is a client too.
const (
	pipeInContainer = "/tmp/nvidia-mps"
	shmInContainer  = "/dev/shm"
)

// mpsEdits are what a container needs to be a client of an MPS daemon. The limits
// in the environment are each process's own; the daemon's bind those that change
// theirs.
func (s *Specs) mpsEdits(c *gpu.MPSClient) (specs.ContainerEdits, error) {
	edits := specs.ContainerEdits{Env: []string{"CUDA_MPS_PIPE_DIRECTORY=" + pipeInContainer}}
	if c.ThreadPercentage > 0 && c.ThreadPercentage < 100 {
		edits.Env = append(edits.Env, fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", c.ThreadPercentage))
	}
	if limits := memoryLimits(c.MemoryMiB); limits != "" {
		edits.Env = append(edits.Env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="+limits)
	}
	for _, dir := range []struct{ host, container, access string }{{c.PipeDir, pipeInContainer, "ro"}, {c.ShmDir, shmInContainer, "rw"}} {
		if dir.host == "" && dir.container == shmInContainer {
			continue
		}
		if info, err := os.Stat(s.cfg.Host.Path(dir.host)); dir.host == "" || err != nil || !info.IsDir() {
			return specs.ContainerEdits{}, fmt.Errorf("directory %q of the MPS daemon isn't on the host: the daemon has just ended, or another program has removed it; it is started again with the next try (the MPS supervisor's log says more)", dir.host)
		}
		edits.Mounts = append(edits.Mounts, &specs.Mount{
			HostPath: dir.host, ContainerPath: dir.container, Options: []string{dir.access, "bind", "nosuid", "nodev", "noexec"},
		})
	}
	return edits, nil
}

// memoryLimits writes "0=1024M,1=2048M": by the daemon's indexes, since limits by
// UUID are ignored.
func memoryLimits(mib []int64) string {
	var limits []string
	for i, m := range mib {
		if m > 0 {
			limits = append(limits, fmt.Sprintf("%d=%dM", i, m))
		}
	}
	return strings.Join(limits, ",")
}
