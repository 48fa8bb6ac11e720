package control

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/labels"
	"github.com/tessera-dra/tessera/pkg/control/nodes"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/policies"
	"github.com/tessera-dra/tessera/pkg/control/ranks"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// addNodes makes the manager run one reconciliation a node, whenever something
// changes that the node's offer follows from: its inventory, one of its slices,
// its labels, a policy, the devices of claims, or the server's abilities.
func addNodes(mgr manager.Manager, n *nodes.Reconciler, slices, claims toolscache.SharedIndexInformer, s *server.Server) error {
	o := nodeOptions(mgr, n)
	o.EnableWarmup = new(true) // a new leader starts with full caches
	all := allNodes(mgr.GetClient())
	return add(mgr, "node", o,
		source.Kind(mgr.GetCache(), &v1alpha1.GPUInventory{}, n.InventoryEvents()),
		source.Kind[client.Object](mgr.GetCache(), &v1alpha1.SharingPolicy{}, all, predicate.GenerationChangedPredicate{}),
		source.Kind[client.Object](mgr.GetCache(), kinds.NodeMetadata(), nodesWithInventory(mgr.GetClient()), predicate.LabelChangedPredicate{}),
		source.Channel(s.Changes(), all),
		informed{slices, "ResourceSlices", n.OfSlice},
		informed{claims, "ResourceClaims", n.OfClaim},
	)
}

// add makes the manager run a controller whose requests come from the sources.
func add(mgr manager.Manager, name string, o controller.Options, from ...source.Source) error {
	ctl, err := controller.New(name, mgr, o)
	if err != nil {
		return fmt.Errorf("set up the controller %s: %w", name, err)
	}
	for _, s := range from {
		if err := ctl.Watch(s); err != nil {
			return fmt.Errorf("set up the controller %s: %w", name, err)
		}
	}
	return nil
}

// options are those of a controller with one worker.
func options(mgr manager.Manager, r reconcile.Reconciler) controller.Options {
	return controller.Options{
		Reconciler:     r,
		RateLimiter:    workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](undone.FirstRetryDelay, undone.MaxRetryDelay),
		LogConstructor: func(*reconcile.Request) logr.Logger { return mgr.GetLogger() },
	}
}

// nodeOptions are those of a controller whose requests are nodes.
func nodeOptions(mgr manager.Manager, r reconcile.Reconciler) controller.Options {
	o := options(mgr, r)
	o.MaxConcurrentReconciles = parallelNodes
	o.LogConstructor = func(node *reconcile.Request) logr.Logger {
		if node == nil {
			return mgr.GetLogger()
		}
		return mgr.GetLogger().WithValues("node", node.Name)
	}
	return o
}

// addPolicies makes the manager reconcile all policies whenever a policy, an
// inventory, a node's labels, the waiting devices, or the server's abilities
// change.
func addPolicies(mgr manager.Manager, r *policies.Reconciler, p *plan.Planner, claims toolscache.SharedIndexInformer, s *server.Server) error {
	o := options(mgr, r)
	o.EnableWarmup = new(true)
	return add(mgr, "policy", o,
		// Statuses too: while the cache lacks the last write, a status looks as if it were right.
		source.Kind[client.Object](mgr.GetCache(), &v1alpha1.SharingPolicy{}, everything()),
		source.Kind[client.Object](mgr.GetCache(), &v1alpha1.GPUInventory{}, everything()),
		source.Kind[client.Object](mgr.GetCache(), kinds.NodeMetadata(), everything(), predicate.LabelChangedPredicate{}),
		source.Channel(s.Changes(), everything()),
		source.Channel(p.Changes(), everything()),
		// Not before it is known what claims have: the statuses say so.
		informed{claims, "ResourceClaims", func(any) []reconcile.Request { return nil }},
	)
}

// addNodeLabels makes the manager label Nodes, whenever an inventory or a
// Node's labels change.
func addNodeLabels(mgr manager.Manager, w *undone.Writes) error {
	labeler := labels.NewLabeler(mgr.GetClient(), mgr.GetAPIReader(), clock.RealClock{}, w)
	return add(mgr, "node-labels", nodeOptions(mgr, labeler),
		source.Kind(mgr.GetCache(), &v1alpha1.GPUInventory{}, &handler.TypedEnqueueRequestForObject[*v1alpha1.GPUInventory]{}),
		source.Kind[client.Object](mgr.GetCache(), kinds.NodeMetadata(), nodesWithLabels(mgr.GetClient()), predicate.LabelChangedPredicate{}),
	)
}

// addLabelRemoval makes the manager remove the labels of Nodes that are left from a controller
// that wrote them. Of Nodes without such labels it does nothing but look at the cached object.
func addLabelRemoval(mgr manager.Manager, w *undone.Writes) error {
	return add(mgr, "node-labels", nodeOptions(mgr, labels.NewRemover(mgr.GetClient(), w)),
		source.Kind[client.Object](mgr.GetCache(), kinds.NodeMetadata(), &handler.EnqueueRequestForObject{}, predicate.NewPredicateFuncs(kinds.HasOurLabels)))
}

// addRanker makes the manager rank nodes, whenever a Node, its slices or its inventory, or the devices
// of claims change. Changes of pods lead to nothing.
func addRanker(mgr manager.Manager, r *ranks.Ranker, slices, claims toolscache.SharedIndexInformer, c *ranks.Cluster) error {
	return add(mgr, "ranks", options(mgr, r),
		source.Kind(mgr.GetCache(), &v1alpha1.GPUInventory{}, &handler.TypedEnqueueRequestForObject[*v1alpha1.GPUInventory]{}),
		informed{slices, "ResourceSlices", ranks.OfSlice},
		informed{claims, "ResourceClaims", ranks.OfClaim},
		informed{c.Nodes, "Nodes", ranks.OfNode},
		informed{c.Pods, "Pods", func(any) []reconcile.Request { return nil }},
	)
}

// rankRemoval removes the ranks that are left from a controller that wrote them, once. Which Nodes
// have some, their metadata doesn't say, so all Nodes are read.
func rankRemoval(nodes typedcorev1.NodeInterface) manager.RunnableFunc {
	return func(ctx context.Context) error {
		err := wait.PollUntilContextCancel(ctx, undone.MaxRetryDelay, true, func(ctx context.Context) (bool, error) {
			err := ranks.RemoveAll(ctx, nodes)
			if err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Ranks of nodes could not be removed; this is tried again")
			}
			return err == nil, nil
		})
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the controller ends
		}
		return err
	}
}
