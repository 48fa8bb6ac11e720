package allocators

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Allocator allocates claims as the scheduler of a Kubernetes release does.
type Allocator interface {
	// Allocate returns the claim's allocation; nil if it has to wait. Slices are in
	// the order in which an informer returns them.
	Allocate(ctx context.Context, q Question) (*resourceapi.AllocationResult, error)
}

// Question is the input of a scheduler that allocates a claim on a node.
type Question struct {
	Node      string
	Slices    []*resourceapi.ResourceSlice
	Allocated []resourceapi.DeviceRequestAllocationResult
	Claim     *resourceapi.ResourceClaim
}

// Library is the allocator of the release that this module is built with.
type Library struct {
	// Features decide which of the release's allocators is used.
	Features    structured.Features
	expressions *cel.Cache
}

// NewLibrary returns the allocator with the features that are beta, or more, in
// Kubernetes 1.37.
func NewLibrary() *Library {
	return &Library{
		Features: structured.Features{
			AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true,
		},
		expressions: cel.NewCache(100, cel.Features{EnableConsumableCapacity: true}),
	}
}

// Allocate implements Allocator.
func (l *Library) Allocate(ctx context.Context, q Question) (*resourceapi.AllocationResult, error) {
	a, err := structured.NewAllocator(ctx, l.Features, state(q.Allocated), classLister{}, q.Slices, l.expressions)
	if err != nil {
		return nil, err
	}
	results, err := a.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: q.Node}}, []*resourceapi.ResourceClaim{q.Claim})
	if err != nil || len(results) == 0 {
		return nil, err
	}
	return &results[0], nil
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

type classLister struct{}

func (classLister) List() ([]*resourceapi.DeviceClass, error) { return classes(), nil }

func (classLister) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, c := range classes() {
		if c.Name == name {
			return c, nil
		}
	}
	return nil, fmt.Errorf("there is no class %s", name)
}
