// Package resourcev1 runs the allocator of Kubernetes 1.34 and later: a module of a
// release requires it and that release's k8s.io/dynamic-resource-allocation.
package resourcev1

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/tessera-dra/tessera/test/allocators/protocol"
)

type request = protocol.Request[resourceapi.DeviceClass, resourceapi.ResourceSlice, resourceapi.DeviceRequestAllocationResult, resourceapi.ResourceClaim]

// Main is the program.
func Main() { protocol.Main(newAllocate()) }

func newAllocate() func(structured.Features, request) (*resourceapi.AllocationResult, error) {
	var expressions *cel.Cache
	return func(f structured.Features, r request) (*resourceapi.AllocationResult, error) {
		if expressions == nil {
			expressions = cel.NewCache(100, cel.Features{EnableConsumableCapacity: f.ConsumableCapacity})
		}
		classes := protocol.Classes[resourceapi.DeviceClass]{All: r.Classes, Names: func(c *resourceapi.DeviceClass) string { return c.Name }}
		a, err := structured.NewAllocator(context.Background(), f, state(r.Allocated), classes, r.Slices, expressions)
		if err != nil {
			return nil, err
		}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.Node}}
		results, err := a.Allocate(context.Background(), node, []*resourceapi.ResourceClaim{r.Claim})
		if err != nil || len(results) == 0 {
			return nil, err
		}
		return &results[0], nil
	}
}

// state returns the allocated devices and capacity, as the scheduler gathers them from
// claims.
func state(results []resourceapi.DeviceRequestAllocationResult) structured.AllocatedState {
	out := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, r := range results {
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		if r.ShareID == nil {
			out.AllocatedDevices.Insert(id)
			continue
		}
		out.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
		if r.ConsumedCapacity != nil {
			out.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
	return out
}
