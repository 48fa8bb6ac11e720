package policy_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/policy"
)

func TestDecide(t *testing.T) {
	early, late := time.Unix(1000, 0), time.Unix(2000, 0)
	for name, tc := range map[string]struct {
		selecting []policy.Policy
		want      string
	}{
		"none":                   {nil, ""},
		"one":                    {[]policy.Policy{{"a", 0, late}}, "a"},
		"priority before age":    {[]policy.Policy{{"a", 0, early}, {"b", 1, late}}, "b"},
		"negative priority":      {[]policy.Policy{{"a", -5, early}, {"b", 0, late}}, "b"},
		"age before name":        {[]policy.Policy{{"a", 3, late}, {"b", 3, early}}, "b"},
		"name when all is equal": {[]policy.Policy{{"c", 3, late}, {"b", 3, late}, {"d", 3, late}}, "b"},
	} {
		t.Run(name, func(t *testing.T) {
			for range 10 {
				rand.Shuffle(len(tc.selecting), func(i, j int) {
					tc.selecting[i], tc.selecting[j] = tc.selecting[j], tc.selecting[i]
				})
				got, ok := policy.Decide(tc.selecting)
				if got.Name != tc.want || ok != (tc.want != "") {
					t.Fatalf("of %v: got %q, %v, want %q", tc.selecting, got.Name, ok, tc.want)
				}
			}
		})
	}
}

func TestSupported(t *testing.T) {
	for name, tc := range map[string]struct {
		plan v1alpha1.Plan
		want error
	}{
		"exclusive":   {v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}}, nil},
		"partitioned": {v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}, policy.ErrPlanNotSupported},
		"mps":         {v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{}}, policy.ErrPlanNotSupported},
		"time-sliced": {v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{}}, policy.ErrPlanNotSupported},
	} {
		t.Run(name, func(t *testing.T) {
			if got := policy.Supported(tc.plan); !errors.Is(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}
