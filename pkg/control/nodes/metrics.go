package nodes

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// Reasons of writes of slices.
const (
	reasonFirst     = "first"
	reasonRepair    = "repair"
	reasonHealth    = "health"
	reasonRelease   = "release"
	reasonDevices   = "devices"
	reasonWithdrawn = "withdrawn"
	reasonForeign   = "foreign"
)

func newWrites(registerer prometheus.Registerer) *prometheus.CounterVec {
	writes := promauto.With(registerer).NewCounterVec(prometheus.CounterOpts{
		Name: "tessera_slice_writes_total",
		Help: "ResourceSlices written or deleted, by reason: first (the node had none), repair (some of a pool were missing), health (only taints changed), release (another release, or none, had written them), devices (anything else of the offer changed), " +
			"withdrawn (the node offers nothing now), foreign (another driver's were deleted).",
	}, []string{"reason"})
	for _, r := range []string{reasonFirst, reasonRepair, reasonHealth, reasonRelease, reasonDevices, reasonWithdrawn, reasonForeign} {
		writes.WithLabelValues(r)
	}
	return writes
}

// countedSlices counts the writes that succeed.
type countedSlices struct {
	Slices
	writes *prometheus.CounterVec
}

// Write implements Slices.
func (c countedSlices) Write(ctx context.Context, current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) error {
	err := c.Slices.Write(ctx, current, want)
	if err == nil {
		c.writes.WithLabelValues(reasonOf(current, want)).Add(float64(len(want) + publish.Superseded(current, want)))
	}
	return err
}

// Delete implements Slices.
func (c countedSlices) Delete(ctx context.Context, current []*resourceapi.ResourceSlice) error {
	err := c.Slices.Delete(ctx, current)
	if err != nil {
		return err
	}
	for _, s := range current {
		reason := reasonWithdrawn
		if s.Labels[publish.ManagedByLabel] != publish.ManagedBy {
			reason = reasonForeign
		}
		c.writes.WithLabelValues(reason).Inc()
	}
	return nil
}

// reasonOf says why live slices are replaced by others.
func reasonOf(current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) string {
	switch {
	case len(current) == 0:
		return reasonFirst
	case !publish.Complete(current):
		return reasonRepair
	case publish.Equal(current, want):
		return reasonRelease
	case publish.Equal(untainted(current), values(untainted(publish.Pointers(want)))):
		return reasonHealth
	default:
		return reasonDevices
	}
}

// untainted returns copies without the devices' taints.
func untainted(all []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
	out := make([]*resourceapi.ResourceSlice, len(all))
	for i, s := range all {
		out[i] = s.DeepCopy()
		for j := range out[i].Spec.Devices {
			out[i].Spec.Devices[j].Taints = nil
		}
	}
	return out
}

func values(all []*resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
	out := make([]resourceapi.ResourceSlice, len(all))
	for i := range all {
		out[i] = *all[i]
	}
	return out
}
