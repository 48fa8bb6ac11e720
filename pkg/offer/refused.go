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
// several claims: at least one of them may have been prepared. Nor is one after the pause: a
// claim may have got the device in its turn, and not have been prepared yet. If it is refused the
// device, the next pause begins.
func (e effects) of(c gpu.Condition, device gpu.DeviceName) gpu.Effect {
	effect := c.EffectOn(device, e.names)
	switch {
	case c.Type != gpu.PrepareFailed:
		return effect
	case device == e.tried:
		return gpu.NoTaint
	case effect == gpu.NoExecute && (c.Turn > 0 || e.haveSeveral(device)):
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
// once the pause has ended, the first refused device that is offered, and when its turn is over
// the next one. Devices that weren't refused and need the same silicon come after these. It is
// empty before.
func triedAgain(offered []resourceapi.Device, conditions []gpu.Condition, names *gpu.Names) gpu.DeviceName {
	i := slices.IndexFunc(conditions, func(c gpu.Condition) bool { return c.Type == gpu.PrepareFailed && c.Turn > 0 })
	if i < 0 {
		return ""
	}
	var others []gpu.DeviceName
	for _, d := range offered {
		if name := gpu.DeviceName(d.Name); conditions[i].BlocksDevice(name, names) {
			others = append(others, name)
		}
	}
	var inTurn []gpu.DeviceName
	for _, name := range conditions[i].Refused {
		if at := slices.Index(others, name); at >= 0 {
			inTurn, others = append(inTurn, name), slices.Delete(others, at, at+1)
		}
	}
	inTurn = append(inTurn, others...)
	if len(inTurn) == 0 {
		return ""
	}
	return inTurn[(conditions[i].Turn-1)%len(inTurn)]
}
