package partition

import (
	"fmt"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// named is a partition as errors call it: "MIG partition 1g.18gb at memory slices 4-4 of
// GPU GPU-…".
type named gpu.Partition

func (p named) String() string {
	return fmt.Sprintf("MIG partition %s at %s of GPU %s", p.Profile, slicesName(p.Placement), p.GPU)
}

// instanceName is how errors call an instance that exists.
func instanceName(i gpu.Instance) string {
	without := ""
	if i.UUID == "" {
		without = ", not one MIG device"
	}
	return fmt.Sprintf("GPU instance %d (%s at %s%s)", i.GPUInstanceID, i.Profile, slicesName(i.Placement), without)
}

func slicesName(p gpu.Placement) string {
	if p.Size == 1 {
		return fmt.Sprintf("memory slice %d", p.Start)
	}
	return fmt.Sprintf("memory slices %d-%d", p.Start, p.Start+p.Size-1)
}

// unreadable returns the message about a GPU whose record can't be read, with
// the remedy.
func unreadable(u journal.UnreadableGPU) string {
	return fmt.Sprintf("journal file %s can't be read (%v), so it isn't known which MIG instances Tessera made on GPU %s: none is made or destroyed there; this ends when the GPU has none and its MIG mode, if Tessera may switch it, is off: end the pods that use it, then nvidia-smi mig -i %s -dci; nvidia-smi mig -i %s -dgi; nvidia-smi -i %s -mig 0",
		u.Path, u.Err, u.GPU, u.GPU, u.GPU, u.GPU)
}

func join(list []string) string {
	if len(list) == 0 {
		return "no instances"
	}
	return strings.Join(list, ", ")
}
