package allocators

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// Spread returns on how many of a node's 8 H100s a scheduler allocates 7 claims
// for the smallest partition, which one GPU has room for; 0 if a claim has to wait.
func Spread(ctx context.Context, a Allocator, server Server, plan v1alpha1.PartitionedPlan, seed uint64) (int, error) {
	node, err := offertest.Node("h100-80gb", 8)
	if err != nil {
		return 0, err
	}
	c := &Cluster{
		Node: node, Plans: offertest.OnePlan(node, v1alpha1.Plan{Partitioned: &plan}), Server: server, Allocator: a,
		Order: rand.New(rand.NewPCG(seed, 12)),
	}
	c.Publish()
	gpus := make(map[string]bool)
	for i := range 7 {
		results, err := c.Ask(ctx, fmt.Sprint(i), Request{Kind: "mig", Profile: "1g.10gb"})
		if err != nil || len(results) == 0 {
			return 0, err
		}
		gpus[results[0].Device[:len("gpu-00000000")]] = true
	}
	return len(gpus), nil
}
