package ranks

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/rank"
)

// OfSlice returns the node of a slice.
func OfSlice(obj any) []reconcile.Request {
	slice, ok := obj.(*resourceapi.ResourceSlice)
	if !ok || slice.Spec.NodeName == nil {
		return nil
	}
	return []reconcile.Request{kinds.Request(*slice.Spec.NodeName)}
}

// OfClaim returns the nodes whose devices a claim has.
func OfClaim(obj any) []reconcile.Request {
	var requests []reconcile.Request
	for _, result := range claims.Results(obj) {
		if request := kinds.Request(result.Pool); !slices.Contains(requests, request) {
			requests = append(requests, request)
		}
	}
	return requests
}

// OfNode returns the Node itself.
func OfNode(obj any) []reconcile.Request {
	node, ok := obj.(*corev1.Node)
	if !ok {
		return nil
	}
	return []reconcile.Request{kinds.Request(node.Name)}
}

// cached returns the Node that the cache has; false if it has none.
func (r *Ranker) cached(name string) (*corev1.Node, bool) {
	obj, _, err := r.Cluster.Nodes.GetStore().GetByKey(name)
	node, ok := obj.(*corev1.Node)
	return node, ok && err == nil // a store in memory has no errors
}

// facts reads what a node's rank follows from. It returns false for one that is gone, or that has
// neither GPUs nor taints of ours.
func (r *Ranker) facts(ctx context.Context, name string) (*node, bool, error) {
	object, ok := r.cached(name)
	if !ok {
		return nil, false, nil
	}
	n := &node{cpu: object.Status.Allocatable.Cpu().MilliValue(), taints: object.Spec.Taints, version: object.ResourceVersion}
	n.Name, n.Pool, n.Away = name, object.Labels[r.PoolLabel], away(object)
	ranked := rank.Of(n.taints) != rank.Rank{}
	inv := &v1alpha1.GPUInventory{}
	err := r.Cache.Get(ctx, client.ObjectKey{Name: name}, inv, client.UnsafeDisableDeepCopy)
	if apierrors.IsNotFound(err) && ranked { // the taints are to be removed, if the cache is right
		inv, err = r.Inventories.Get(ctx, name)
	}
	switch {
	case apierrors.IsNotFound(err) || err == nil && inv == nil:
		return n, ranked, nil
	case err != nil:
		return nil, false, fmt.Errorf("read GPUInventory %s: %w", name, err)
	}
	return n, true, r.count(n, inv)
}

// count counts the node's GPUs.
func (r *Ranker) count(n *node, inv *v1alpha1.GPUInventory) error {
	offered, err := r.Slices.Cached(n.Name)
	if err != nil {
		return err
	}
	if len(offered.Ours) == 0 || kinds.DriverFails(inv) {
		n.Away = true // its GPUs are unknown
		return nil
	}
	if !publish.Complete(offered.Ours) { // the pool is being written, slice by slice
		n.asBefore(r.nodes[n.Name])
		return nil
	}
	allocated, err := r.Claims.In(n.Name)
	if err != nil {
		return err
	}
	used, wholes := uses(allocated)
	facts := inventory.Node(inv)
	names := gpu.NameAll(facts.GPUs)
	for _, g := range facts.GPUs {
		name, named := names.Name(gpu.Whole{GPU: g.UUID})
		sick := slices.ContainsFunc(g.Conditions, func(c gpu.Condition) bool { return c.BlocksDevice(name, names) })
		if named && (sick || r.Slices.Offers(n.Name, name)) {
			n.add(!sick && !used[name])
		}
	}
	n.OneClaim = n.GPUs > 0 && wholes == n.GPUs
	return nil
}

// add counts a GPU.
func (n *node) add(free bool) {
	n.GPUs++
	if free {
		n.Free++
	}
}

// asBefore takes over what was last known of the node's GPUs; without that, they are unknown.
func (n *node) asBefore(before *node) {
	if before == nil || before.GPUs == 0 {
		n.Away = true
		return
	}
	n.GPUs, n.Free, n.OneClaim = before.GPUs, before.Free, before.OneClaim
}

// uses returns of which GPUs claims have something, and how many whole ones the claim with the most
// has.
func uses(allocated []claims.Allocation) (used map[gpu.DeviceName]bool, wholes int) {
	used = make(map[gpu.DeviceName]bool)
	count := make(map[string]int)
	for _, a := range allocated {
		used[a.Device.Whole()] = true
		if a.Device.Type() == gpu.TypeGPU {
			count[a.Claim]++
			wholes = max(wholes, count[a.Claim])
		}
	}
	return used, wholes
}

// leaving are keys of taints by which autoscalers say that a node is about to be deleted.
func leaving() []string { return []string{"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted"} }

// away reports whether no pod should come to a node now.
func away(n *corev1.Node) bool {
	return n.DeletionTimestamp != nil || n.Spec.Unschedulable || !ready(n) ||
		slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return slices.Contains(leaving(), t.Key) })
}

func ready(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
