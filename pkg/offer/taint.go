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

// taint puts the conditions on the devices that they concern, which are all of the GPU for
// an error of the GPU: one taint each, the worst first.
func taint(g GPU, conditions []gpu.Condition, e effects, informational bool) {
	for i := range g.Devices {
		d := &g.Devices[i]
		d.Taints = taintsOf(conditions, gpu.DeviceName(d.Name), e, informational)
	}
}

// taintsOf returns the taints of one device of a GPU that has the conditions.
func taintsOf(conditions []gpu.Condition, device gpu.DeviceName, e effects, informational bool) []resourceapi.DeviceTaint {
	var out []resourceapi.DeviceTaint
	for _, c := range conditions {
		effect := e.of(c, device)
		if effect == gpu.NoTaint || effect == gpu.Informational && !informational {
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

// BlockingTaints returns the taints that keep new claims off the device.
func BlockingTaints(d resourceapi.Device) []resourceapi.DeviceTaint {
	return slices.DeleteFunc(slices.Clone(d.Taints), func(t resourceapi.DeviceTaint) bool { return t.Effect == resourceapi.DeviceTaintEffectNone })
}

// withoutTaints returns the devices as they are offered where they can't have taints:
// without those that taints keep new claims off. Of these, the ones that claims have stay,
// so that their counters are charged, with the attribute type of a leftover, so that no new
// claim gets them.
func withoutTaints(devices []resourceapi.Device, claimed []gpu.DeviceName) []resourceapi.Device {
	var out []resourceapi.Device
	for _, d := range devices {
		if len(BlockingTaints(d)) > 0 {
			if !slices.Contains(claimed, gpu.DeviceName(d.Name)) {
				continue
			}
			attributes(d.Attributes).string("type", typeLeftover)
		}
		d.Taints = nil
		out = append(out, d)
	}
	return out
}

func rank(e resourceapi.DeviceTaintEffect) int {
	return slices.Index([]resourceapi.DeviceTaintEffect{
		resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute,
	}, e)
}
