package control

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
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/tessera-dra/tessera/pkg/control/pages"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// poolIndex finds the claims that have devices of a pool.
const poolIndex = "pool"

// allocation is a device that is allocated to a claim.
type allocation struct {
	device gpu.DeviceName
	claim  string // namespace/name
}

// claimClient is k8s.io/dynamic-resource-allocation/client, which speaks the
// version that the server has and answers in v1.
type claimClient interface {
	resourceclient.ResourceClaimsGetter
	// IsWatchListSemanticsUnSupported is asked by the informer.
	IsWatchListSemanticsUnSupported() bool
}

// claimIndex caches which of this driver's devices are allocated to claims. It watches all
// claims of the cluster; trim says which of their fields are kept.
type claimIndex struct {
	informer cache.SharedIndexInformer
}

// newClaimIndex returns an index whose informer isn't running yet.
func newClaimIndex(client claimClient) (*claimIndex, error) {
	all := client.ResourceClaims(metav1.NamespaceAll)
	informer := cache.NewSharedIndexInformer(
		pages.Paged(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				return all.List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				return all.Watch(ctx, o)
			},
		}, client), trim),
		&resourceapi.ResourceClaim{}, 0,
		cache.Indexers{poolIndex: func(obj any) ([]string, error) {
			var pools []string
			for _, r := range results(obj) {
				pools = append(pools, r.Pool)
			}
			return pools, nil
		}})
	if err := informer.SetTransform(trim); err != nil {
		return nil, fmt.Errorf("set up the ResourceClaim cache: %w", err)
	}
	return &claimIndex{informer: informer}, nil
}

// trim returns a claim with only its identity, the time of its creation and its devices of
// this driver or, while it waits, the DeviceClass by which it is counted.
func trim(obj any) (any, error) {
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
	if ours := slices.DeleteFunc(slices.Clone(results(claim)), notHeld); len(ours) > 0 {
		small.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: ours}}
	}
	return small, nil
}

// notHeld reports whether a result is another driver's, or doesn't keep others from the
// device, because it is for admin access.
func notHeld(r resourceapi.DeviceRequestAllocationResult) bool {
	return r.Driver != gpu.DriverName || r.AdminAccess != nil && *r.AdminAccess
}

func results(obj any) []resourceapi.DeviceRequestAllocationResult {
	claim, ok := obj.(*resourceapi.ResourceClaim)
	if !ok || claim.Status.Allocation == nil {
		return nil
	}
	return claim.Status.Allocation.Devices.Results
}

// createdAfter implements allocationReader. It leaves out claims for extended resources.
func (c *claimIndex) createdAfter(pool string, at time.Time) ([]*resourceapi.ResourceClaim, error) {
	objs, err := c.informer.GetIndexer().ByIndex(poolIndex, pool)
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

// in lists the devices of a pool that are allocated to claims, sorted, each once
// for each claim.
func (c *claimIndex) in(pool string) ([]allocation, error) {
	objs, err := c.informer.GetIndexer().ByIndex(poolIndex, pool)
	if err != nil {
		return nil, fmt.Errorf("read the ResourceClaim cache for pool %s: %w", pool, err)
	}
	return allocations(objs, pool), nil
}

func allocations(objs []any, pool string) []allocation {
	var out []allocation
	for _, obj := range objs {
		claim, ok := obj.(*resourceapi.ResourceClaim)
		if !ok {
			continue
		}
		for _, r := range results(obj) {
			if r.Pool == pool {
				out = append(out, allocation{device: gpu.DeviceName(r.Device), claim: claim.Namespace + "/" + claim.Name})
			}
		}
	}
	slices.SortFunc(out, allocation.compare)
	return slices.Compact(out)
}

func (a allocation) compare(b allocation) int {
	return cmp.Or(strings.Compare(string(a.device), string(b.device)), strings.Compare(a.claim, b.claim))
}
