// Package claims knows which devices of this driver claims have, and counts the claims.
package claims

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	draclient "k8s.io/dynamic-resource-allocation/client"

	"github.com/tessera-dra/tessera/pkg/control/pages"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// poolIndex finds the claims that have devices of a pool.
const poolIndex = "pool"

// Allocation is a device that is allocated to a claim.
type Allocation struct {
	Device gpu.DeviceName
	Claim  string // namespace/name
}

// Index caches which of this driver's devices are allocated to claims. It watches all claims of
// the cluster; Trim says which of their fields are kept.
type Index struct {
	// Informer has the claims. It must run.
	Informer cache.SharedIndexInformer
}

// New returns an index whose informer isn't running yet.
func New(client *draclient.Client) (*Index, error) {
	all := client.ResourceClaims(metav1.NamespaceAll)
	informer, err := pages.NewInformer(client, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return all.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return all.Watch(ctx, o)
		},
	}, &resourceapi.ResourceClaim{}, Trim, cache.Indexers{poolIndex: func(obj any) ([]string, error) {
		var pools []string
		for _, r := range Results(obj) {
			pools = append(pools, r.Pool)
		}
		return pools, nil
	}})
	if err != nil {
		return nil, err
	}
	return &Index{Informer: informer}, nil
}

// Trim returns a claim with only its identity, the time of its creation and its devices of
// this driver or, while it waits, the DeviceClass by which it is counted.
func Trim(obj any) (any, error) {
	claim, ok := obj.(*resourceapi.ResourceClaim)
	if !ok {
		return obj, nil
	}
	small := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, ResourceVersion: claim.ResourceVersion,
	}}
	// The scheduler creates claims for extended resources after it has allocated them, so
	// the time of their creation is of no use.
	if _, extended := claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation]; !extended {
		small.CreationTimestamp = claim.CreationTimestamp
	}
	if class, _ := waitsFor(claim); class != "" {
		small.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class}}}
	}
	if ours := slices.DeleteFunc(slices.Clone(Results(claim)), notHeld); len(ours) > 0 {
		small.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: ours}}
	}
	return small, nil
}

// notHeld reports whether a result is another driver's, or doesn't keep others from the
// device, because it is for admin access.
func notHeld(r resourceapi.DeviceRequestAllocationResult) bool {
	return r.Driver != gpu.DriverName || r.AdminAccess != nil && *r.AdminAccess
}

// Results returns the devices of a claim, of the type that informers have.
func Results(obj any) []resourceapi.DeviceRequestAllocationResult {
	claim, ok := obj.(*resourceapi.ResourceClaim)
	if !ok || claim.Status.Allocation == nil {
		return nil
	}
	return claim.Status.Allocation.Devices.Results
}

// CreatedAfter returns the claims with devices of the pool that were created, and so allocated,
// after a time. It leaves out claims for extended resources.
func (c *Index) CreatedAfter(pool string, at time.Time) ([]*resourceapi.ResourceClaim, error) {
	objs, err := c.Informer.GetIndexer().ByIndex(poolIndex, pool)
	if err != nil {
		return nil, fmt.Errorf("read the ResourceClaim cache for pool %s: %w", pool, err)
	}
	var out []*resourceapi.ResourceClaim
	for _, obj := range objs {
		if claim, ok := obj.(*resourceapi.ResourceClaim); ok && claim.CreationTimestamp.After(at) {
			out = append(out, claim)
		}
	}
	return out, nil
}

// In lists the devices of a pool that are allocated to claims, sorted, each once
// for each claim.
func (c *Index) In(pool string) ([]Allocation, error) {
	objs, err := c.Informer.GetIndexer().ByIndex(poolIndex, pool)
	if err != nil {
		return nil, fmt.Errorf("read the ResourceClaim cache for pool %s: %w", pool, err)
	}
	return allocations(objs, pool), nil
}

func allocations(objs []any, pool string) []Allocation {
	var out []Allocation
	for _, obj := range objs {
		claim, ok := obj.(*resourceapi.ResourceClaim)
		if !ok {
			continue
		}
		for _, r := range Results(obj) {
			if r.Pool == pool {
				out = append(out, Allocation{Device: gpu.DeviceName(r.Device), Claim: claim.Namespace + "/" + claim.Name})
			}
		}
	}
	slices.SortFunc(out, Allocation.compare)
	return slices.Compact(out)
}

func (a Allocation) compare(b Allocation) int {
	return cmp.Or(strings.Compare(string(a.Device), string(b.Device)), strings.Compare(a.Claim, b.Claim))
}
