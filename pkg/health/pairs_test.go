package health_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// TestTruthTableOfTwoXIDs: two XIDs, at least one of them decided on before the driver has
// answered, and then its answer. None may hide the other.
func TestTruthTableOfTwoXIDs(t *testing.T) {
	const notRead, unknown, unheardOf = gpu.RecoveryNotRead, gpu.RecoveryUnsupported, gpu.RecoveryOther
	lost := silent(gpu.Condition{Type: gpu.Lost, Message: "fell off the bus"})
	meanings, count := readMeanings(t), 0
	codes := samples(meanings)
	for _, first := range codes {
		for _, second := range codes {
			of := func(table map[meaning]expected, also ...gpu.ConditionType) []gpu.ConditionType {
				return worstFirst(append(also, table[meanings[first]].condition, table[meanings[second]].condition)...)
			}
			for name, tc := range map[string]struct {
				steps []step
				want  []gpu.ConditionType
			}{
				"unread":                       {[]step{xid(first, notRead), xid(second, notRead), silent()}, of(whileUnread)},
				"no actions":                   {[]step{xid(first, notRead), xid(second, notRead), action(unknown)}, of(withoutAction)},
				"lost":                         {[]step{xid(first, notRead), xid(second, notRead), lost}, of(withoutAction, gpu.Lost)},
				"needs none":                   {[]step{xid(first, notRead), xid(second, notRead), action(gpu.RecoveryNone)}, nil},
				"needs a reset":                {[]step{xid(first, notRead), xid(second, notRead), action(gpu.RecoveryReset)}, worstFirst(gpu.ResetRequired)},
				"needs a bus reset":            {[]step{xid(first, notRead), xid(second, notRead), action(gpu.RecoveryBusReset)}, worstFirst(gpu.BusResetRequired)},
				"the first was definite":       {[]step{xid(first, unknown), xid(second, notRead), action(unknown)}, of(withoutAction)},
				"the second is definite":       {[]step{xid(first, notRead), xid(second, unknown), action(unknown)}, of(withoutAction)},
				"the second, and needs others": {[]step{xid(first, notRead), xid(second, unheardOf), action(unheardOf)}, worstFirst(gpu.NeedsInspection, withoutAction[meanings[second]].condition)},
			} {
				s := after(t, tc.steps...)
				var got []gpu.ConditionType
				for _, c := range s.Conditions() {
					got = append(got, c.Type)
				}
				if !slices.Equal(tc.want, got) {
					t.Errorf("XID %d and %d, %s: conditions %v, want %v", first, second, name, got, tc.want)
				}
				if len(tc.want) == 0 && !s.Equal(health.State{}) {
					t.Errorf("XID %d and %d, %s: the state isn't that of a healthy GPU: %+v", first, second, name, s)
				}
				count++
			}
		}
	}
	t.Logf("%d cases", count)
}

// samples returns the least and the greatest code of each meaning.
func samples(meanings map[uint64]meaning) []uint64 {
	codes := slices.Sorted(maps.Keys(meanings))
	least, greatest := map[meaning]uint64{}, map[meaning]uint64{}
	for _, code := range codes {
		greatest[meanings[code]] = code
	}
	for _, code := range slices.Backward(codes) {
		least[meanings[code]] = code
	}
	all := slices.Sorted(maps.Values(least))
	return slices.Compact(slices.Sorted(slices.Values(slices.AppendSeq(all, maps.Values(greatest)))))
}

// worstFirst returns those of the types that aren't empty in the order of conditions.
func worstFirst(types ...gpu.ConditionType) (out []gpu.ConditionType) {
	for _, t := range []gpu.ConditionType{gpu.Lost, gpu.RebootRequired, gpu.BusResetRequired, gpu.ResetRequired, gpu.NeedsInspection} {
		if slices.Contains(types, t) {
			out = append(out, t)
		}
	}
	return out
}
