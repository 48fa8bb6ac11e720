package rank

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// ReserveKey is the key of the taint that keeps pods off the hard reserve, but those that tolerate
// it.
const ReserveKey = "gpu.tessera.dev/reserve"

// keys of the taints of ranks, in their order.
func keys() [ReserveTaints]string {
	return [...]string{
		"gpu.tessera.dev/rank-1", "gpu.tessera.dev/rank-2", "gpu.tessera.dev/rank-3",
		"gpu.tessera.dev/rank-4", "gpu.tessera.dev/rank-5", "gpu.tessera.dev/rank-6",
	}
}

// Ours reports whether a taint is one that ranks are written as. One with such a key and another
// effect is somebody else's.
func Ours(t corev1.Taint) bool {
	if t.Key == ReserveKey {
		return t.Effect == corev1.TaintEffectNoSchedule
	}
	all := keys()
	return t.Effect == corev1.TaintEffectPreferNoSchedule && slices.Contains(all[:], t.Key)
}

// Of reads a node's rank off its taints.
func Of(taints []corev1.Taint) Rank {
	var r Rank
	for _, t := range taints {
		switch {
		case !Ours(t):
		case t.Key == ReserveKey:
			r.Hard = true
		default:
			r.Taints++
		}
	}
	return r
}

// Apply returns a node's taints with those of the rank in the place of all that are ours. Others
// stay as they are, in their order. If nothing is to be changed it returns its argument, not a
// copy, and false: it is called for all nodes whenever a claim comes or goes.
func (r Rank) Apply(taints []corev1.Taint) ([]corev1.Taint, bool) {
	if r.matches(taints) {
		return taints, false
	}
	out := slices.DeleteFunc(slices.Clone(taints), Ours)
	all := keys()
	for _, k := range all[:min(r.Taints, ReserveTaints)] {
		out = append(out, corev1.Taint{Key: k, Effect: corev1.TaintEffectPreferNoSchedule})
	}
	if r.Hard {
		out = append(out, corev1.Taint{Key: ReserveKey, Effect: corev1.TaintEffectNoSchedule})
	}
	return out, true
}

// matches reports whether the taints that are ours are exactly those of the rank, in their order.
func (r Rank) matches(taints []corev1.Taint) bool {
	all := keys()
	want, hard := all[:min(r.Taints, ReserveTaints)], r.Hard
	for _, t := range taints {
		switch {
		case !Ours(t):
		case len(want) > 0 && t.Key == want[0]:
			want = want[1:]
		case len(want) == 0 && hard && t.Key == ReserveKey:
			hard = false
		default:
			return false
		}
	}
	return len(want) == 0 && !hard
}
