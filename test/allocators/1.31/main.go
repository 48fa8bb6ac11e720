// The allocator of Kubernetes 1.31.
package main

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1alpha3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/tessera-dra/tessera/test/allocators/protocol"
)

type request = protocol.Request[resourceapi.DeviceClass, resourceapi.ResourceSlice, resourceapi.DeviceRequestAllocationResult, resourceapi.ResourceClaim]

func main() {
	protocol.Main(func(_ struct{}, r request) (*resourceapi.AllocationResult, error) {
		held := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: r.Allocated},
		}}}
		classes := classLister{protocol.Classes[resourceapi.DeviceClass]{All: r.Classes, Names: func(c *resourceapi.DeviceClass) string { return c.Name }}}
		a, err := structured.NewAllocator(context.Background(), []*resourceapi.ResourceClaim{r.Claim}, claims{held}, classes, slices(r.Slices))
		if err != nil {
			return nil, err
		}
		results, err := a.Allocate(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.Node}})
		if err != nil || len(results) == 0 {
			return nil, err
		}
		return results[0], nil
	})
}

type claims []*resourceapi.ResourceClaim

func (c claims) ListAllAllocated() ([]*resourceapi.ResourceClaim, error) { return c, nil }

type classLister struct {
	protocol.Classes[resourceapi.DeviceClass]
}

func (c classLister) List(labels.Selector) ([]*resourceapi.DeviceClass, error) { return c.All, nil }

type slices []*resourceapi.ResourceSlice

func (s slices) List(labels.Selector) ([]*resourceapi.ResourceSlice, error) { return s, nil }

func (s slices) Get(string) (*resourceapi.ResourceSlice, error) { panic("the allocator lists") }
