// The allocator of Kubernetes 1.33.
package main

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/tessera-dra/tessera/test/allocators/protocol"
)

type request = protocol.Request[resourceapi.DeviceClass, resourceapi.ResourceSlice, resourceapi.DeviceRequestAllocationResult, resourceapi.ResourceClaim]

func main() {
	expressions := cel.NewCache(100)
	protocol.Main(func(f structured.Features, r request) (*resourceapi.AllocationResult, error) {
		allocated := sets.New[structured.DeviceID]()
		for _, result := range r.Allocated {
			allocated.Insert(structured.MakeDeviceID(result.Driver, result.Pool, result.Device))
		}
		classes := protocol.Classes[resourceapi.DeviceClass]{All: r.Classes, Names: func(c *resourceapi.DeviceClass) string { return c.Name }}
		a, err := structured.NewAllocator(context.Background(), f, []*resourceapi.ResourceClaim{r.Claim}, allocated, classes, r.Slices, expressions)
		if err != nil {
			return nil, err
		}
		results, err := a.Allocate(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.Node}})
		if err != nil || len(results) == 0 {
			return nil, err
		}
		return &results[0], nil
	})
}
