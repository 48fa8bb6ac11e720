package offer_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// TestLeftoversOfOtherCounts: while claims have shares that the plan doesn't
// offer, no other claim gets a device of the GPU; afterwards claims do.
func TestLeftoversOfOtherCounts(t *testing.T) {
	for name, tc := range map[string]struct {
		before, after v1alpha1.Plan
		what          request
		want          offered
	}{
		"other number":       {equalShares(4), equalShares(2), oneShare, offered{Devices: "mps4-0", Leftover: "mps4-0"}},
		"other number, size": {equalShares(4), bySize("1Gi", 2), oneShare, offered{Devices: "mps4-0", Leftover: "mps4-0"}},
		"size, then number":  {bySize("1Gi", 2), equalShares(4), oneShare, offered{Devices: "mps", Leftover: "mps"}},
		"size, other step":   {bySize("1Gi", 2), bySize("10Gi", 2), oneShare, offered{Devices: "whole mps"}},
		"exclusive":          {equalShares(4), v1alpha1.Plan{}, oneShare, offered{Devices: "mps4-0", Leftover: "mps4-0"}},
		"partitioned":        {inTurn(4), v1alpha1.Plan{Partitioned: only("3g.40gb")}, oneTurn, offered{Devices: "ts4-0", Leftover: "ts4-0"}},
		"from partitions":    {v1alpha1.Plan{Partitioned: only("3g.40gb")}, equalShares(4), request{Kind: "mig"}, offered{Devices: "3g40gb-0", Leftover: "3g40gb-0"}},
		"from whole":         {v1alpha1.Plan{}, equalShares(2), wholeGPU, offered{Devices: "whole mps2-0 mps2-1"}},
		"turns, then shares": {inTurn(2), equalShares(2), oneTurn, offered{Devices: "ts2-0", Leftover: "ts2-0"}},
		"partitions, then shares of them": {v1alpha1.Plan{Partitioned: only("3g.40gb")}, sharedParts(2, "3g.40gb"), request{Kind: "mig"},
			offered{Devices: "whole 3g40gb-0 3g40gb-0-mps 3g40gb-4-mps", Leftover: "3g40gb-0", Counters: "s0=1"}},
		"shares of partitions, then none": {sharedParts(2, "3g.40gb"), v1alpha1.Plan{}, oneShare,
			offered{Devices: "whole 3g40gb-0-mps", Leftover: "3g40gb-0-mps"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, tc.before)
			if s.asks("a", tc.what); s.claims["a"] == nil {
				t.Fatal("nothing was given")
			}
			s.plan(tc.after)
			if diff := cmp.Diff(tc.want, inShort(s.offered())); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			checkLeftover(t, s.offered())
			s.leaves("a")
			fresh := newScheduler(t, tc.after)
			if diff := cmp.Diff(inShort(fresh.offered()), inShort(s.offered())); diff != "" {
				t.Errorf("when the claim is gone (-want +got):\n%s", diff)
			}
		})
	}
}

// TestSharesOfBefore: shares that were allocated while they consumed counters,
// under an earlier release, hold back all else of their GPU.
func TestSharesOfBefore(t *testing.T) {
	for name, plan := range map[string]v1alpha1.Plan{
		"by size": bySize("1Gi", 4), "of partitions": sharedParts(2, "1g.10gb", "3g.40gb"),
	} {
		for now, after := range map[string]v1alpha1.Plan{"same plan": plan, "partitioned": {Partitioned: only("1g.10gb", "3g.40gb")}, "exclusive": {}} {
			t.Run(name+", "+now, func(t *testing.T) {
				s := newScheduler(t, plan)
				if s.asks("share", oneShare) == "" {
					t.Fatal("nothing was given")
				}
				s.options.Charged = false
				s.plan(after)
				for _, what := range []request{wholeGPU, {Kind: "mig", Profile: "1g.10gb"}, {Kind: "mig", Profile: "3g.40gb"}} {
					s.waits("other "+what.Kind+what.Profile, what)
				}
				checkHeld(t, s)
			})
		}
	}
}
