package fit_test

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/test/allocators"
)

// TestJointCounters: where the server wants counters in the slices of their devices, as
// Kubernetes 1.33 and 1.34 do, as much fits as elsewhere; nothing while a slice is missing.
func TestJointCounters(t *testing.T) {
	n, err := offertest.Node("h100-80gb", 16)
	if err != nil {
		t.Fatal(err)
	}
	for name, form := range map[string]publish.Counters{"joint": publish.JointCounters, "split": publish.SplitCounters} {
		c := &allocators.Cluster{
			Node: n, Plans: offertest.OnePlan(n, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}), Allocator: allocators.NewLibrary(),
			Server: allocators.Server{Server: offer.Server{Counters: true, MaxTainted: form.MaxTainted()}, Form: form},
		}
		c.Publish()
		o := objects(c)
		for claim, want := range map[*resourceapi.ResourceClaim]int{exactly("gpu"): 16, exactly("mig", profile("1g.10gb")): 16 * 7} {
			for _, missing := range []int{0, 1} {
				part := o
				part.Slices = o.Slices[missing:]
				if missing > 0 {
					want = 0
				}
				j := fit.NewJudge(part)
				got, err := j.Fits(t.Context(), j.Nodes(), waiting(claim), 200)
				if err != nil || got.Count != want {
					t.Errorf("%s, %d of %d slices missing: %d fit, %v, want %d: %+v", name, missing, len(o.Slices), got.Count, err, want, got.Reason)
				}
			}
		}
	}
}
