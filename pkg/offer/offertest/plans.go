package offertest

import (
	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// OnePlan returns the same plan for all GPUs of a node.
func OnePlan(n gpu.Node, plan v1alpha1.Plan) map[gpu.UUID]v1alpha1.Plan {
	out := make(map[gpu.UUID]v1alpha1.Plan, len(n.GPUs))
	for _, g := range n.GPUs {
		out[g.UUID] = plan
	}
	return out
}
