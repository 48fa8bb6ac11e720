package offer

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// effects has what the effects of a GPU's conditions on its devices depend on, besides the
// conditions.
type effects struct {
	names *gpu.Names
	// claimed are the devices that claims have, each once for each claim.
	claimed []gpu.DeviceName
	// tried is the device that a claim is to try; empty: none.
	tried gpu.DeviceName
}

// of returns the effect of a condition on a device. No pod is ended that has a device of
// several claims: at least one of them may have been prepared.
func (e effects) of(c gpu.Condition, device gpu.DeviceName) gpu.Effect {
	effect := c.EffectOn(device, e.names)
	switch {
	case c.Type != gpu.PrepareFailed:
		return effect
	case device == e.tried:
		return gpu.NoTaint
	case effect == gpu.NoExecute && e.haveSeveral(device):
		return c.Type.Effect()
	default:
		return effect
	}
}

// haveSeveral reports whether several claims have the device.
func (e effects) haveSeveral(device gpu.DeviceName) bool {
	i := slices.Index(e.claimed, device)
	return i >= 0 && slices.Contains(e.claimed[i+1:], device)
}

// triedAgain returns the device that a claim is to try although the GPU refused its silicon:
// once the pause has ended, the first refused device that is offered or, if the plan has none of
// them any more, the first device that needs their silicon. It is empty before.
func triedAgain(offered []resourceapi.Device, conditions []gpu.Condition, names *gpu.Names) gpu.DeviceName {
	i := slices.IndexFunc(conditions, func(c gpu.Condition) bool { return c.Type == gpu.PrepareFailed && c.RetryDue })
	if i < 0 {
		return ""
	}
	var needing []gpu.DeviceName
	for _, d := range offered {
		if name := gpu.DeviceName(d.Name); conditions[i].BlocksDevice(name, names) {
			needing = append(needing, name)
		}
	}
	for _, name := range slices.Concat(conditions[i].Refused, needing) {
		if slices.Contains(needing, name) {
			return name
		}
	}
	return ""
}
