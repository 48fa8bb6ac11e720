package fit_test

import (
	"context"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/test/allocators"
)

// TestTooLong: claims with more combinations of devices than anybody can try get an
// answer: that the scheduler gives up, or the request that can't be met even alone. The
// end of the context stays an error.
func TestTooLong(t *testing.T) {
	n, err := offertest.Node("h100-80gb", 8)
	if err != nil {
		t.Fatal(err)
	}
	c := &allocators.Cluster{
		Node: n, Plans: offertest.OnePlan(n, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}), Allocator: allocators.NewLibrary(),
		Server: allocators.Server{Server: offer.Server{Counters: true, MaxTainted: 64}, Form: publish.SplitCounters},
	}
	c.Publish()
	// Nine partitions are on at least two of the eight GPUs, which then aren't whole.
	hard := together(exactly("mig", profile("1g.10gb"), times(9)), exactly("gpu", times(7)))
	for name, tc := range map[string]struct {
		claims []*resourceapi.ResourceClaim
		want   fit.Cause
	}{
		"hard":                {[]*resourceapi.ResourceClaim{hard}, fit.TooLong},
		"hard and impossible": {[]*resourceapi.ResourceClaim{hard, exactly("mig", profile("5g.80gb"))}, fit.NoMatch},
	} {
		t.Run(name, func(t *testing.T) {
			j := fit.NewJudge(objects(c))
			j.GiveUpAfter(500 * time.Millisecond)
			got, err := j.Fits(t.Context(), j.Nodes(), waiting(tc.claims...), 1)
			if err != nil || got.Count != 0 || got.Reason == nil || got.Reason.Cause != tc.want {
				t.Errorf("%+v, %v; want the cause %s", got.Reason, err, tc.want)
			}
		})
	}
	t.Run("interrupted", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		j := fit.NewJudge(objects(c))
		if got, err := j.Fits(ctx, j.Nodes(), waiting(hard), 1); err == nil {
			t.Errorf("%+v, want an error", got)
		}
	})
}
