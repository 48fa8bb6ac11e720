package control

import (
	"context"
	"errors"

	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/labels"
)

// everything maps every event to the one request that policies know.
func everything() handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{{}}
	})
}

// allNodes maps every event to all nodes that have an inventory, with a lower priority than
// events of a single node: a node whose slices were deleted offers nothing until it is
// reconciled.
func allNodes(c client.Reader) handler.EventHandler {
	type requests = workqueue.TypedRateLimitingInterface[reconcile.Request]
	enqueue := func(ctx context.Context, queue requests) {
		var list v1alpha1.GPUInventoryList
		if err := c.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
			return // only before the cache is filled, which then sends an event for each inventory
		}
		nodes := make([]reconcile.Request, len(list.Items))
		for i := range list.Items {
			nodes[i] = kinds.Request(list.Items[i].Name)
		}
		if q, ok := queue.(priorityqueue.PriorityQueue[reconcile.Request]); ok {
			q.AddWithOpts(priorityqueue.AddOpts{Priority: new(handler.LowPriority)}, nodes...)
		}
	}
	return handler.Funcs{
		CreateFunc:  func(ctx context.Context, _ event.CreateEvent, q requests) { enqueue(ctx, q) },
		UpdateFunc:  func(ctx context.Context, _ event.UpdateEvent, q requests) { enqueue(ctx, q) },
		DeleteFunc:  func(ctx context.Context, _ event.DeleteEvent, q requests) { enqueue(ctx, q) },
		GenericFunc: func(ctx context.Context, _ event.GenericEvent, q requests) { enqueue(ctx, q) },
	}
}

// nodesWithInventory maps a Node to itself, if it has an inventory: most
// clusters have many nodes without GPUs.
func nodesWithInventory(c client.Reader) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		if c.Get(ctx, client.ObjectKey{Name: o.GetName()}, &v1alpha1.GPUInventory{}, client.UnsafeDisableDeepCopy) != nil {
			return nil
		}
		return []reconcile.Request{kinds.Request(o.GetName())}
	})
}

// nodesWithLabels maps a Node to itself, if it has an inventory or, perhaps from
// one that is gone, labels about GPUs.
func nodesWithLabels(c client.Reader) handler.EventHandler {
	return handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		if c.Get(ctx, client.ObjectKey{Name: o.GetName()}, &v1alpha1.GPUInventory{}, client.UnsafeDisableDeepCopy) != nil && !labels.AboutGPUs(o) {
			return nil
		}
		return []reconcile.Request{kinds.Request(o.GetName())}
	})
}

// informed is a source that listens to an informer of ours. The informer isn't
// the manager's own, because the manager's can't read objects in the version
// that the server happens to have.
type informed struct {
	informer toolscache.SharedIndexInformer
	// what names the informer's objects in errors.
	what string
	// requests that an object's event leads to.
	requests func(obj any) []reconcile.Request
}

// Start begins to listen.
func (s informed) Start(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	enqueue := func(obj any) {
		if gone, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		for _, r := range s.requests(obj) {
			queue.Add(r)
		}
	}
	_, err := s.informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    enqueue,
		UpdateFunc: func(old, obj any) { enqueue(old); enqueue(obj) },
		DeleteFunc: enqueue,
	})
	return err
}

// WaitForSync waits until the informer's cache is filled.
func (s informed) WaitForSync(ctx context.Context) error {
	if !toolscache.WaitForCacheSync(ctx.Done(), s.informer.HasSynced) {
		return errors.New("the cache of " + s.what + " could not be filled")
	}
	return nil
}

// informerRunner runs an informer in every replica, leader or not.
type informerRunner struct {
	informer toolscache.SharedIndexInformer
}

// Start runs the informer until ctx ends.
func (r informerRunner) Start(ctx context.Context) error {
	r.informer.RunWithContext(ctx)
	return nil
}

// NeedLeaderElection says that it runs without.
func (informerRunner) NeedLeaderElection() bool { return false }
