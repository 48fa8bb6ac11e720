package nodes

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Another driver of the same name may have left slices of a node behind, or may
// still run there. Its slices are deleted once. If it writes them again, it runs,
// and the node is contested: this driver publishes nothing there until the foreign
// slices stay away.
const (
	// comesBack is how soon after a deletion new slices mean that their driver
	// runs: it writes them again within staysAway, or when it is started again.
	comesBack = 10 * time.Minute
	// staysAway is for how long a contested node has to be without foreign slices:
	// longer than the 30 s after which a driver that is built with Kubernetes' own
	// library writes deleted slices again (resourceslice.DefaultSyncDelay).
	staysAway = 45 * time.Second
	// A contested node is tried again after firstContest, and, each time that its
	// slices come back, after twice as long, up to maxContest.
	firstContest = time.Minute
	maxContest   = 30 * time.Minute
)

// evict deletes foreign slices.
func (n *Reconciler) evict(ctx context.Context, node string, foreign []*resourceapi.ResourceSlice) error {
	if len(foreign) == 0 {
		return nil
	}
	klog.FromContext(ctx).Info("Deleting what another driver has published for the node", "slices", len(foreign), "example", foreign[0].Name)
	if err := n.Slices.Delete(ctx, foreign); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.evicted[node] = n.Clock.Now()
	return nil
}

// sinceEviction is how long ago foreign slices of the node were deleted.
func (n *Reconciler) sinceEviction(node string) (time.Duration, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	at, ok := n.evicted[node]
	return n.Clock.Since(at), ok
}

// cameBack reports whether the present foreign slices were written after a
// deletion, by a driver that still runs.
func (n *Reconciler) cameBack(node string) bool {
	since, ok := n.sinceEviction(node)
	return ok && since < comesBack
}

// setContested sets the condition that leaves the node to the other driver.
func (n *Reconciler) setContested(ctx context.Context, inv *v1alpha1.GPUInventory, foreign []*resourceapi.ResourceSlice) error {
	n.contests.begin(inv.Name)
	n.forget(inv.Name)
	return n.setCondition(ctx, inv, metav1.Condition{
		Type: v1alpha1.ConditionConflicting, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonForeignSlices,
		Message: fmt.Sprintf("Another driver publishes ResourceSlices of %s for this node, %s for one, and wrote them again after they were deleted: "+
			"two drivers would give the same GPU to two pods, so that Tessera publishes nothing here. Remove the other DRA driver for GPUs from this node, "+
			"or keep Tessera's plugin off it. Tessera tries again from time to time.", gpu.DriverName, foreign[0].Name),
	})
}

// contest ends the contested state once no foreign slices appear any more. With a
// growing pause it asks the plugin and, when that has answered, deletes the foreign
// slices: nothing else deletes the slices of a driver that was removed.
func (n *Reconciler) contest(ctx context.Context, inv *v1alpha1.GPUInventory, cached publish.Found) (reconcile.Result, error) {
	left := n.contests.left(inv.Name)
	if len(cached.Foreign) > 0 && len(cached.Ours) == 0 && left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	current, err := n.Slices.Live(ctx, inv.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	if err := n.withdraw(ctx, inv.Name, inv, current.Ours); err != nil {
		return reconcile.Result{}, err
	}
	since, evicted := n.sinceEviction(inv.Name)
	switch {
	case len(current.Foreign) == 0 && evicted && since < staysAway:
		return reconcile.Result{RequeueAfter: staysAway - since}, nil
	case len(current.Foreign) == 0:
		return reconcile.Result{}, n.setCondition(ctx, inv, metav1.Condition{
			Type: v1alpha1.ConditionConflicting, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNoOtherDriver,
			Message: "nobody else publishes this node's GPUs any more",
		})
	case left > 0:
		return reconcile.Result{RequeueAfter: left}, nil
	case !n.answered(inv):
		return n.raisePublishRequest(ctx, inv)
	}
	n.forget(inv.Name)
	n.contests.begin(inv.Name)
	return reconcile.Result{RequeueAfter: staysAway}, n.evict(ctx, inv.Name, current.Foreign)
}
