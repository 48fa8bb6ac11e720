// The allocator of Volcano: its plugin predicates, of which the play asks the predicate for claims.
package main

import (
	"context"

	"k8s.io/kubernetes/pkg/scheduler/framework"
	volcano "volcano.sh/volcano/pkg/scheduler/framework"
	"volcano.sh/volcano/pkg/scheduler/plugins/predicates"

	"github.com/tessera-dra/tessera/test/allocators/others/handle"
)

func main() {
	handle.Main(func(h *handle.Handle) (func(context.Context) error, error) {
		p := predicates.New(volcano.Arguments{
			predicates.DynamicResourceAllocationEnable: true,
			predicates.NodeAffinityEnable:              false,
			predicates.NodePortsEnable:                 false,
			predicates.TaintTolerationEnable:           false,
			predicates.PodAffinityEnable:               false,
			predicates.NodeVolumeLimitsEnable:          false,
			predicates.VolumeZoneEnable:                false,
			predicates.PodTopologySpreadEnable:         false,
			predicates.VolumeBindingEnable:             false,
		}).(*predicates.PredicatesPlugin)
		p.Handle = h
		p.InitPlugin()
		return func(ctx context.Context) error {
			state := framework.NewCycleState()
			if err := h.Filter(ctx, state, p.PrefilterPlugins[handle.Name], p.FilterPlugins[handle.Name]); err != nil {
				return err
			}
			return h.Reserve(ctx, state, p.ReservePlugins[handle.Name])
		}, nil
	})
}
