// Package fit judges which claims fit where, and why others don't, with the allocator
// that Kubernetes' own scheduler has, so that its verdicts can't differ from the
// scheduler's: of the version in go.mod, with the features that are on by default
// there. Fields of older servers are missing in what it is given, as they are in what
// their schedulers see.
//
// Reasons are found by asking the same allocator about the same claims with less in
// the way: without other claims, without taints, request by request.
//
// It reads objects that somebody else fetched and asks no server.
package fit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Objects are what a scheduler knows: those of all drivers.
type Objects struct {
	// Nodes may be empty: then the nodes are those that slices name.
	Nodes   []corev1.Node
	Slices  []resourceapi.ResourceSlice
	Classes []resourceapi.DeviceClass
	Claims  []resourceapi.ResourceClaim
	// Pods are those on nodes whose device plugins have what is asked for (see
	// ServedByPlugins); nil: they aren't known.
	Pods []corev1.Pod
	// TaintRules add taints to devices of the slices.
	TaintRules []resourceapi.DeviceTaintRule
}

// Judge knows a cluster at one time. Its methods may be called at the same time.
type Judge struct {
	nodes []*corev1.Node
	// bare: only the nodes' names are known.
	bare    bool
	byNode  map[string][]*resourceapi.ResourceSlice
	shared  []*resourceapi.ResourceSlice
	classes classes
	// used is how much of each extended resource pods have, by node; nil: it isn't known.
	used map[string]corev1.ResourceList
	// byPool are the allocated claims that have devices of a pool.
	byPool map[pool][]*resourceapi.ResourceClaim
	cache  *cel.Cache
	// within is for how long combinations of devices are tried on a node.
	within time.Duration
}

type pool struct{ driver, name string }

// features are those that Kubernetes 1.37 has on by default.
func features() structured.Features {
	return structured.Features{
		AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
		FractionalCapacityRange: true, PartitionableDevices: true, PrioritizedList: true,
	}
}

// maxExpressions is how many compiled selectors are kept.
const maxExpressions = 100

// NewJudge returns a judge of the cluster that the objects describe. It keeps them:
// don't change them.
func NewJudge(o Objects) *Judge {
	j := &Judge{
		byNode: make(map[string][]*resourceapi.ResourceSlice), byPool: make(map[pool][]*resourceapi.ResourceClaim),
		cache: cel.NewCache(maxExpressions, cel.Features{EnableConsumableCapacity: true}), within: filterTimeout, classes: make(classes, len(o.Classes)),
	}
	all := separate(WithTaintRules(o.Slices, o.TaintRules))
	for i := range all {
		s := &all[i]
		if s.Spec.NodeName == nil {
			j.shared = append(j.shared, s)
			continue
		}
		j.byNode[*s.Spec.NodeName] = append(j.byNode[*s.Spec.NodeName], s)
	}
	for i := range o.Classes {
		j.classes[o.Classes[i].Name] = &o.Classes[i]
	}
	for i := range o.Claims {
		for p := range poolsOf(&o.Claims[i]) {
			j.byPool[p] = append(j.byPool[p], &o.Claims[i])
		}
	}
	for i := range o.Nodes {
		j.nodes = append(j.nodes, &o.Nodes[i])
	}
	j.used = usedByPods(o.Pods)
	if len(j.nodes) == 0 {
		j.bare = true
		for name := range j.byNode {
			j.nodes = append(j.nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
	}
	slices.SortFunc(j.nodes, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	return j
}

// poolsOf returns the pools that a claim has devices of, other than to watch them.
func poolsOf(c *resourceapi.ResourceClaim) sets.Set[pool] {
	out := sets.New[pool]()
	for _, r := range results(c) {
		out.Insert(pool{r.Driver, r.Pool})
	}
	return out
}

// results are the devices that a claim keeps from others.
func results(c *resourceapi.ResourceClaim) []resourceapi.DeviceRequestAllocationResult {
	if c.Status.Allocation == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(c.Status.Allocation.Devices.Results), func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.AdminAccess != nil && *r.AdminAccess
	})
}

// Nodes returns all nodes, by name.
func (j *Judge) Nodes() []*corev1.Node { return j.nodes }

// slicesFor are the slices with devices that pods on the node may have.
func (j *Judge) slicesFor(node *corev1.Node) []*resourceapi.ResourceSlice {
	return slices.Concat(j.byNode[node.Name], j.shared)
}

// holders are the claims that have devices which pods on the node might have had.
func (j *Judge) holders(node *corev1.Node) []*resourceapi.ResourceClaim {
	pools := sets.New[pool]()
	for _, s := range j.slicesFor(node) {
		pools.Insert(pool{s.Spec.Driver, s.Spec.Pool.Name})
	}
	var out []*resourceapi.ResourceClaim
	for p := range pools {
		out = append(out, j.byPool[p]...)
	}
	slices.SortFunc(out, func(a, b *resourceapi.ResourceClaim) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return slices.Compact(out)
}

// trial is one question to the allocator: whether a pod's claims fit on a node.
type trial struct {
	node   *corev1.Node
	claims []*resourceapi.ResourceClaim
	// holders are the claims that have devices: where there is no node yet, only the pod's
	// own, which stay.
	holders []*resourceapi.ResourceClaim
	// untainted: taints are ignored.
	untainted bool
}

// errUnjudgeable is wrapped by errors of claims that the scheduler refuses on any node,
// errTooLong by those of claims on which it gives up.
var (
	errUnjudgeable = errors.New("the scheduler refuses it")
	errTooLong     = errors.New("timed out trying to allocate devices")
)

// filterTimeout is for how long the scheduler tries combinations of devices on a node,
// its default. Then it gives up on the pod, whatever other nodes have, and tries again
// later.
const filterTimeout = 10 * time.Second

// ask returns the allocations that the claims would get; nil if they don't fit.
func (j *Judge) ask(ctx context.Context, t trial) ([]resourceapi.AllocationResult, error) {
	claims := allocatedOn(t.node, t.claims)
	if len(claims) == 0 {
		return []resourceapi.AllocationResult{}, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, j.within, fmt.Errorf("%w: node %s: %w", errUnjudgeable, t.node.Name, errTooLong))
	defer cancel()
	f := features()
	f.DeviceTaints = !t.untainted
	a, err := structured.NewAllocator(ctx, f, state(t.holders), j.classes, j.slicesFor(t.node), j.cache)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnjudgeable, err)
	}
	out, err := a.Allocate(ctx, t.node, claims)
	switch {
	case errors.Is(err, structured.ErrFailedAllocationOnNode):
		return nil, nil
	case err != nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errUnjudgeable, err)
	}
	return out, nil
}

// state lists the allocated devices, as the scheduler gathers them from claims.
func state(claims []*resourceapi.ResourceClaim) structured.AllocatedState {
	out := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, c := range claims {
		for _, r := range results(c) {
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
	}
	return out
}

// classes are DeviceClasses by name.
type classes map[string]*resourceapi.DeviceClass

// List implements structured.DeviceClassLister.
func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	out := make([]*resourceapi.DeviceClass, 0, len(c))
	for _, class := range c {
		out = append(out, class)
	}
	return out, nil
}

// Get implements structured.DeviceClassLister.
func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class := c[name]; class != nil {
		return class, nil
	}
	return nil, apierrors.NewNotFound(resourceapi.Resource("deviceclasses"), name)
}
