package nodes

import (
	"context"
	"errors"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// replaceSlices replaces the live slices with those of the decision, now or after the
// plugin's answer. Foreign slices are deleted after that answer: it shows that the
// plugin is the one that the kubelet has registered.
func (n *Reconciler) replaceSlices(ctx context.Context, node string, inv *v1alpha1.GPUInventory, current publish.Found, d plan.Decision) (reconcile.Result, error) {
	alone := len(current.Foreign) == 0
	switch {
	case len(d.Pool) == 0:
		return reconcile.Result{}, n.withdraw(ctx, node, inv, current.Ours)
	case alone && publish.Equal(current.Ours, d.Pool) && n.isOurs(current.Ours):
		n.forget(inv.Name) // an answer to an earlier request must not serve for a later deletion
		return reconcile.Result{}, nil
	case !alone && n.cameBack(inv.Name):
		return reconcile.Result{}, errors.Join(n.setContested(ctx, inv, current.Foreign), n.withdraw(ctx, node, inv, current.Ours))
	case alone && publish.Complete(current.Ours) || n.lives(inv, current):
		return reconcile.Result{}, n.publish(ctx, inv, current, d)
	default:
		if err := n.deleteOurs(ctx, node, inv, current.Ours); err != nil {
			return reconcile.Result{}, err
		}
		return n.raisePublishRequest(ctx, inv)
	}
}

// publish deletes the foreign slices and writes ours.
func (n *Reconciler) publish(ctx context.Context, inv *v1alpha1.GPUInventory, current publish.Found, d plan.Decision) error {
	// An answer, or a registration, is valid for one attempt: if this one fails, the
	// plugin may be gone at the next.
	n.forget(inv.Name)
	if err := n.evict(ctx, inv.Name, current.Foreign); err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Publishing the node's devices", "slices", len(d.Pool), "before", len(current.Ours))
	return n.write(ctx, inv, current, d)
}

// write writes our slices, and keeps count of failures.
func (n *Reconciler) write(ctx context.Context, inv *v1alpha1.GPUInventory, current publish.Found, d plan.Decision) error {
	node := inv.Name
	n.mu.Lock()
	n.unseen[node] = true
	n.mu.Unlock()
	n.Writes.Forget(deletionOf(node)) // what is deleted next may be what a write that fails leaves
	if err := n.Slices.Write(ctx, current.Ours, d.Pool); err != nil {
		n.failures.begin(node)
		if publish.Doubtful(err) {
			err = errors.Join(err, n.Server.ProbeAgain(ctx))
		}
		return err
	}
	n.failures.forget(node)
	return n.reportUndone(ctx, inv, n.Writes.Record(slicesOf(node), d.Account.Pool),
		"ResourceSlices that the controller writes are changed or deleted", current.Ours)
}
