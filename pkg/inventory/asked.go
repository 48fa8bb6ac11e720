package inventory

import (
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// KeepWarm returns how long policies want idle partitions of single GPUs to stay.
func KeepWarm(inv *v1alpha1.GPUInventory) map[gpu.UUID]time.Duration {
	keep := map[gpu.UUID]time.Duration{}
	for _, g := range inv.Spec.GPUs {
		if g.KeepWarm != nil && g.KeepWarm.Duration > 0 {
			keep[gpu.UUID(g.UUID)] = g.KeepWarm.Duration
		}
	}
	return keep
}

// TimeSlices returns the interval of turns that policies want for replicas of single
// GPUs.
func TimeSlices(inv *v1alpha1.GPUInventory) map[gpu.UUID]string {
	intervals := map[gpu.UUID]string{}
	for _, g := range inv.Spec.GPUs {
		if g.TimeSlice != "" {
			intervals[gpu.UUID(g.UUID)] = string(g.TimeSlice)
		}
	}
	return intervals
}

// Resettable returns the GPUs that policies let the plugin reset.
func Resettable(inv *v1alpha1.GPUInventory) map[gpu.UUID]bool {
	may := map[gpu.UUID]bool{}
	for _, g := range inv.Spec.GPUs {
		if g.Reset == v1alpha1.ResetWhenIdle {
			may[gpu.UUID(g.UUID)] = true
		}
	}
	return may
}
