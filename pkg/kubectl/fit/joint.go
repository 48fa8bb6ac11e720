package fit

import resourceapi "k8s.io/api/resource/v1"

// separate returns the slices with counters in slices of their own, as the allocator
// wants them. Servers of Kubernetes 1.33 and 1.34 have them in the slices of the devices
// that consume them, which the allocator of a later version ignores. The slices that
// are given aren't changed.
func separate(all []resourceapi.ResourceSlice) []resourceapi.ResourceSlice {
	type generation struct {
		pool
		number int64
	}
	of := func(s *resourceapi.ResourceSlice) generation {
		return generation{pool{s.Spec.Driver, s.Spec.Pool.Name}, s.Spec.Pool.Generation}
	}
	more := make(map[generation]int64)
	for i := range all {
		if isJoint(&all[i]) {
			more[of(&all[i])]++
		}
	}
	if len(more) == 0 {
		return all
	}
	out := make([]resourceapi.ResourceSlice, 0, 2*len(all))
	for _, s := range all {
		s.Spec.Pool.ResourceSliceCount += more[of(&s)]
		if isJoint(&s) {
			counters := s
			counters.Name += "-counters"
			counters.Spec.Devices, s.Spec.SharedCounters = nil, nil
			out = append(out, counters)
		}
		out = append(out, s)
	}
	return out
}

func isJoint(s *resourceapi.ResourceSlice) bool {
	return len(s.Spec.SharedCounters) > 0 && len(s.Spec.Devices) > 0
}
