package nodes

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// OfSlice is the node of every slice that comes, changes or goes. Slices of
// another driver on nodes without an inventory trigger nothing.
func (n *Reconciler) OfSlice(obj any) []reconcile.Request {
	slice, ok := obj.(*resourceapi.ResourceSlice)
	if !ok || slice.Spec.NodeName == nil {
		return nil
	}
	node := *slice.Spec.NodeName
	if slice.Labels[publish.ManagedByLabel] != publish.ManagedBy &&
		n.Client.Get(context.Background(), client.ObjectKey{Name: node}, &v1alpha1.GPUInventory{}, client.UnsafeDisableDeepCopy) != nil {
		return nil
	}
	return []reconcile.Request{kinds.Request(node)}
}

// OfClaim lists the nodes to reconcile after an event of a claim: their offer
// depends on claims only while claims have devices that the plan doesn't offer, or that
// new claims shouldn't get. In a steady state, claims that are created and deleted trigger
// nothing.
func (n *Reconciler) OfClaim(obj any) []reconcile.Request {
	var requests []reconcile.Request
	for _, r := range claims.Results(obj) {
		if n.Planner.DependsOnClaims(r.Pool) || !n.Slices.Offers(r.Pool, gpu.DeviceName(r.Device)) {
			requests = append(requests, kinds.Request(r.Pool))
		}
	}
	return requests
}

// InventoryEvents returns the handler that enqueues the node of each inventory that changes.
func (n *Reconciler) InventoryEvents() handler.TypedEventHandler[*v1alpha1.GPUInventory, reconcile.Request] {
	return &inventoryEvents{registrations: n.registrations}
}

// inventoryEvents enqueues the node of each inventory that changes.
type inventoryEvents struct {
	handler.TypedEnqueueRequestForObject[*v1alpha1.GPUInventory]
	registrations *registrations
}

type inventoryQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// Create implements handler.TypedEventHandler.
func (h *inventoryEvents) Create(ctx context.Context, e event.TypedCreateEvent[*v1alpha1.GPUInventory], queue inventoryQueue) {
	if !e.IsInInitialList {
		h.registrations.saw(nil, e.Object)
	}
	h.TypedEnqueueRequestForObject.Create(ctx, e, queue)
}

// Update implements handler.TypedEventHandler.
func (h *inventoryEvents) Update(ctx context.Context, e event.TypedUpdateEvent[*v1alpha1.GPUInventory], queue inventoryQueue) {
	h.registrations.saw(e.ObjectOld, e.ObjectNew)
	h.TypedEnqueueRequestForObject.Update(ctx, e, queue)
}
