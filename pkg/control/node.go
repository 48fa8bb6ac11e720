package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// slicePublisher is what a node's reconciliation needs of publish.Publisher.
type slicePublisher interface {
	Cached(node string) ([]*resourceapi.ResourceSlice, error)
	Live(ctx context.Context, node string) ([]*resourceapi.ResourceSlice, error)
	Write(ctx context.Context, current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) error
	Delete(ctx context.Context, current []*resourceapi.ResourceSlice) error
}

// nodes reconciles one node at a time: the node's GPUInventory against its
// ResourceSlices. Different nodes run in parallel and share nothing.
type nodes struct {
	client client.Client // reads come from the cache
	live   client.Reader
	slices slicePublisher
	plans  *plans

	// failures holds back nodes that could not be published. The work queue's
	// rate limiter can't: what a failed attempt did write wakes the controller.
	failures *flowcontrol.Backoff

	mu    sync.Mutex
	asked map[string]request
}

// request is a publishRequest that was raised and not yet made use of.
type request struct {
	inventory types.UID
	number    int64
}

func newNodes(c client.Client, live client.Reader, p slicePublisher, plans *plans) *nodes {
	return &nodes{
		client: c, live: live, slices: p, plans: plans,
		failures: flowcontrol.NewBackOff(firstRetryDelay, maxRetryDelay), asked: make(map[string]request),
	}
}

// Reconcile brings one node's slices in line. In a steady state it reads the
// caches and writes nothing.
func (n *nodes) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	inv, err := n.inventory(ctx, r.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	var want []resourceapi.ResourceSlice
	if publishable(inv) {
		want, err = n.wanted(ctx, inv)
	}
	switch {
	case errors.Is(err, errNodeUnknown):
		return reconcile.Result{}, nil
	case err != nil:
		return reconcile.Result{}, err
	}
	if len(want) == 0 {
		n.forget(r.Name)
		n.failures.Reset(r.Name)
	}
	cached, err := n.slices.Cached(r.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	if publish.Equal(cached, want) {
		return reconcile.Result{}, nil
	}
	if len(want) > 0 && n.failures.IsInBackOffSinceUpdate(r.Name, n.failures.Clock.Now()) {
		return reconcile.Result{RequeueAfter: n.failures.Get(r.Name)}, nil
	}
	current, err := n.slices.Live(ctx, r.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{}, n.settle(ctx, inv, current, want)
}

// publishable says whether a node should have a pool: not without an
// inventory, while the inventory goes away, before the kubelet has registered
// the plugin, and where another driver serves the GPUs.
func publishable(inv *v1alpha1.GPUInventory) bool {
	return inv != nil && inv.DeletionTimestamp == nil && !inv.Status.RegisteredAt.IsZero() &&
		!meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionConflicting)
}

// wanted is the pool that a node should have. On the way there it tells the
// node, in the inventory, what the policies ask of it. It is a terminal error
// if the inventory isn't owned by its Node: its slices would outlive the Node.
func (n *nodes) wanted(ctx context.Context, inv *v1alpha1.GPUInventory) ([]resourceapi.ResourceSlice, error) {
	i := slices.IndexFunc(inv.OwnerReferences, func(o metav1.OwnerReference) bool {
		return o.Kind == "Node" && o.APIVersion == corev1.SchemeGroupVersion.String() && o.Name == inv.Name
	})
	if i < 0 {
		return nil, reconcile.TerminalError(fmt.Errorf(
			"the GPUInventory %s is not owned by Node %s: nothing is published for it; delete it, and the node's plugin makes it anew", inv.Name, inv.Name))
	}
	d, err := n.plans.decide(ctx, inv)
	if err != nil {
		return nil, err
	}
	if err := n.tell(ctx, inv, d.requests); err != nil {
		return nil, err
	}
	o := inv.OwnerReferences[i]
	node := metav1.OwnerReference{APIVersion: o.APIVersion, Kind: o.Kind, Name: o.Name, UID: o.UID, Controller: new(true)}
	return publish.Pool(node, d.gpus, d.form), nil
}

// tell writes into the inventory what the policies ask of the node, if it
// isn't there. The patch says nothing about the rest of the spec.
func (n *nodes) tell(ctx context.Context, inv *v1alpha1.GPUInventory, requests []v1alpha1.GPUSpec) error {
	if equality.Semantic.DeepEqual(inv.Spec.GPUs, requests) {
		return nil
	}
	before := inv.DeepCopy()
	inv.Spec.GPUs = requests
	if err := n.client.Patch(ctx, inv, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("write spec.gpus of GPUInventory %s: %w", inv.Name, err)
	}
	klog.FromContext(ctx).Info("Told the node what policies ask of it", "gpus", len(requests))
	return nil
}

// settle makes the live slices what is wanted, now or after the plugin's
// answer.
func (n *nodes) settle(ctx context.Context, inv *v1alpha1.GPUInventory, current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) error {
	logger := klog.FromContext(ctx)
	switch {
	case publish.Equal(current, want):
		return nil
	case len(want) == 0:
		logger.Info("Withdrawing the node's devices", "slices", len(current))
		return n.slices.Delete(ctx, current)
	case publish.Complete(current) || n.answered(inv):
		// An answer serves one attempt: if this one fails, who knows what became
		// of the plugin by the next.
		n.forget(inv.Name)
		logger.Info("Publishing the node's devices", "slices", len(want), "before", len(current))
		return n.write(ctx, inv.Name, current, want)
	default:
		if err := n.slices.Delete(ctx, current); err != nil {
			return err
		}
		return n.ask(ctx, inv)
	}
}

// write publishes, and keeps count of failures.
func (n *nodes) write(ctx context.Context, node string, current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) error {
	if err := n.slices.Write(ctx, current, want); err != nil {
		n.failures.Next(node, n.failures.Clock.Now())
		if publish.Doubtful(err) {
			err = errors.Join(err, n.plans.server.doubt(ctx))
		}
		return err
	}
	n.failures.Reset(node)
	return nil
}

// ask raises the node's publishRequest, unless one is under way.
func (n *nodes) ask(ctx context.Context, inv *v1alpha1.GPUInventory) error {
	if n.underWay(inv) != 0 {
		return nil
	}
	number := max(inv.Spec.PublishRequest, inv.Status.PublishResponse) + 1
	raised := inv.DeepCopy()
	raised.Spec.PublishRequest = number
	// Only on what the cache showed: the number may have been used since, by the
	// controller before this one.
	err := n.client.Patch(ctx, raised, client.MergeFromWithOptions(inv, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone or changed since; word of it is on its way here
	}
	if err != nil {
		return fmt.Errorf("raise publishRequest of GPUInventory %s: %w", inv.Name, err)
	}
	klog.FromContext(ctx).Info("Asked the node's plugin whether to publish", "publishRequest", number)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked[inv.Name] = request{inventory: inv.UID, number: number}
	return nil
}

// answered says whether the plugin has answered the request under way.
func (n *nodes) answered(inv *v1alpha1.GPUInventory) bool {
	number := n.underWay(inv)
	return number != 0 && inv.Status.PublishResponse >= number
}

// underWay is the number of the request under way, or 0. One that was made of
// an inventory that has since been deleted and made anew counts no more.
func (n *nodes) underWay(inv *v1alpha1.GPUInventory) int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r := n.asked[inv.Name]; r.inventory == inv.UID {
		return r.number
	}
	return 0
}

func (n *nodes) forget(node string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.asked, node)
}

// inventory returns the node's GPUInventory, or nil where there is none. That
// there is none decides about deleting slices, so the server is asked.
func (n *nodes) inventory(ctx context.Context, node string) (*v1alpha1.GPUInventory, error) {
	inv := &v1alpha1.GPUInventory{}
	key := types.NamespacedName{Name: node}
	err := n.client.Get(ctx, key, inv)
	if apierrors.IsNotFound(err) {
		err = n.live.Get(ctx, key, inv)
	}
	switch {
	case apierrors.IsNotFound(err):
		n.plans.forget(node)
		return nil, nil //nolint:nilnil // no inventory is an answer, not an error
	case err != nil:
		return nil, fmt.Errorf("read GPUInventory %s: %w", node, err)
	}
	return inv, nil
}
