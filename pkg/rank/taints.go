package rank

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// ReserveKey is the key of the taint that keeps pods off the hard reserve, but those that tolerate
// it.
const ReserveKey = "gpu.tessera.dev/reserve"

// key of the n-th taint, from 1.
func key(n int) string { return fmt.Sprintf("gpu.tessera.dev/rank-%d", n) }

// Ours reports whether a taint is one that ranks are written as. One with such a key and another
// effect is somebody else's.
func Ours(t corev1.Taint) bool {
	if t.Key == ReserveKey {
		return t.Effect == corev1.TaintEffectNoSchedule
	}
	return t.Effect == corev1.TaintEffectPreferNoSchedule && slices.Contains(keys(), t.Key)
}

func keys() []string {
	var out []string
	for n := range ReserveTaints {
		out = append(out, key(n+1))
	}
	return out
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
// stay as they are, in their order. It returns false if nothing is to be changed.
func (r Rank) Apply(taints []corev1.Taint) ([]corev1.Taint, bool) {
	var ours []corev1.Taint
	for _, k := range keys()[:min(r.Taints, ReserveTaints)] {
		ours = append(ours, corev1.Taint{Key: k, Effect: corev1.TaintEffectPreferNoSchedule})
	}
	if r.Hard {
		ours = append(ours, corev1.Taint{Key: ReserveKey, Effect: corev1.TaintEffectNoSchedule})
	}
	out := slices.DeleteFunc(slices.Clone(taints), Ours)
	before := slices.DeleteFunc(slices.Clone(taints), func(t corev1.Taint) bool { return !Ours(t) })
	same := slices.EqualFunc(before, ours, func(a, b corev1.Taint) bool { return a.Key == b.Key && a.Effect == b.Effect })
	return append(out, ours...), !same
}
