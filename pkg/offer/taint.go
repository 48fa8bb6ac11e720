package offer

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// maxTaints of a device, on the servers that allow the fewest (Kubernetes 1.33 and
// 1.34).
const maxTaints = 4

// taint puts the conditions on all devices of their GPU, because an error of a GPU, and
// its remedy, concern all parts, and those of MPS on its shares: one taint each, the
// worst first.
func taint(g GPU, conditions []gpu.Condition, server Server) {
	if !server.Taints {
		return
	}
	for i := range g.Devices {
		d := &g.Devices[i]
		d.Taints = taintsOf(conditions, gpu.DeviceName(d.Name), g.Name, server.InformationalTaints)
	}
}

// taintsOf returns the taints of one device of the GPU whole, which has the conditions.
func taintsOf(conditions []gpu.Condition, device, whole gpu.DeviceName, informational bool) []resourceapi.DeviceTaint {
	var out []resourceapi.DeviceTaint
	for _, c := range conditions {
		effect := c.Effect()
		switch {
		case c.Type == gpu.RowRemapPending && device != whole:
			effect = c.Type.Effect() // a policy means claims for the whole GPU
		case c.Type.OnlyShares() && !device.IsShare():
			effect = gpu.NoEffect
		}
		if effect == gpu.NoEffect || effect == gpu.Informational && !informational {
			continue
		}
		since := metav1.NewTime(c.Since)
		if c.Since.IsZero() {
			since = metav1.Unix(0, 0) // a server replaces a zero time by its own
		}
		out = append(out, resourceapi.DeviceTaint{
			Key: gpu.TaintKey, Value: string(c.Type), Effect: resourceapi.DeviceTaintEffect(effect), TimeAdded: &since,
		})
	}
	slices.SortFunc(out, func(a, b resourceapi.DeviceTaint) int {
		return cmp.Or(cmp.Compare(rank(b.Effect), rank(a.Effect)), cmp.Compare(a.Value, b.Value))
	})
	return out[:min(len(out), maxTaints)]
}

func rank(e resourceapi.DeviceTaintEffect) int {
	return slices.Index([]resourceapi.DeviceTaintEffect{
		resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute,
	}, e)
}
