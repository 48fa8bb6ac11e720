package fit

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// WithTaintRules returns the slices as the scheduler sees them: devices have the taints
// of the DeviceTaintRules that select them beside their own. The slices that are given
// aren't changed.
func WithTaintRules(all []resourceapi.ResourceSlice, rules []resourceapi.DeviceTaintRule) []resourceapi.ResourceSlice {
	if len(rules) == 0 {
		return all
	}
	out := slices.Clone(all)
	for i := range out {
		s := &out[i]
		copied := false
		for k := range s.Spec.Devices {
			for _, r := range rules {
				if !selects(r.Spec.DeviceSelector, s, s.Spec.Devices[k].Name) {
					continue
				}
				if !copied {
					s, copied = s.DeepCopy(), true
				}
				s.Spec.Devices[k].Taints = append(s.Spec.Devices[k].Taints, r.Spec.Taint)
			}
		}
		out[i] = *s
	}
	return out
}

// selects reports whether the selector matches a device of the slice. An empty one
// matches all devices, and none matches none.
func selects(selector *resourceapi.DeviceTaintSelector, s *resourceapi.ResourceSlice, device string) bool {
	equal := func(want *string, got string) bool { return want == nil || *want == got }
	return selector != nil && equal(selector.Driver, s.Spec.Driver) && equal(selector.Pool, s.Spec.Pool.Name) && equal(selector.Device, device)
}
