package inventory

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// KeepWarm returns how long policies want idle partitions of single GPUs to stay.
func KeepWarm(inv *v1alpha1.GPUInventory) map[gpu.UUID]time.Duration {
	return asked(inv, func(g v1alpha1.GPUSpec) time.Duration {
		return max(0, ptr.Deref(g.KeepWarm, metav1.Duration{}).Duration)
	})
}

// TimeSlices returns the interval of turns that policies want for replicas of single
// GPUs.
func TimeSlices(inv *v1alpha1.GPUInventory) map[gpu.UUID]string {
	return asked(inv, func(g v1alpha1.GPUSpec) string { return string(g.TimeSlice) })
}

// Resettable returns the GPUs that policies let the plugin reset.
func Resettable(inv *v1alpha1.GPUInventory) map[gpu.UUID]bool {
	return asked(inv, func(g v1alpha1.GPUSpec) bool { return g.Reset == v1alpha1.ResetWhenIdle })
}

// asked returns what policies ask for in one field of the GPUs' settings, without the GPUs of
// which they ask nothing.
func asked[V comparable](inv *v1alpha1.GPUInventory, field func(v1alpha1.GPUSpec) V) map[gpu.UUID]V {
	var nothing V
	all := map[gpu.UUID]V{}
	for _, g := range inv.Spec.GPUs {
		if v := field(g); v != nothing {
			all[gpu.UUID(g.UUID)] = v
		}
	}
	return all
}
