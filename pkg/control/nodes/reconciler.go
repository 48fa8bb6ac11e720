// Package nodes reconciles nodes: what the GPUInventory of each says, and the policies, against its
// ResourceSlices and the settings in its inventory.
package nodes

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/decision"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/control/undone"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Slices is the port to the slices at the API server, a publish.Publisher: tests have pools that
// are written in part, and caches that lag behind.
type Slices interface {
	Cached(node string) (publish.Found, error)
	Offers(node string, device gpu.DeviceName) bool
	Live(ctx context.Context, node string) (publish.Found, error)
	Write(ctx context.Context, current []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) error
	Delete(ctx context.Context, current []*resourceapi.ResourceSlice) error
}

// Config has what a Reconciler works with.
type Config struct {
	Client client.Client // reads come from the cache
	Reader client.Reader // not a cache
	Slices Slices
	// Release is the identity of the slices of this release, see publish.ReleaseAnnotation.
	// Empty: it has none.
	Release string
	Planner *plan.Planner
	Server  *server.Server
	Claims  *claims.Index
	// Writes paces writes that somebody else undoes.
	Writes  *undone.Writes
	Events  events.EventRecorder
	Metrics prometheus.Registerer
	Clock   clock.Clock
	// Leads is closed once this controller leads.
	Leads <-chan struct{}
}

// Reconciler reconciles one node at a time: the node's GPUInventory against its ResourceSlices.
// Different nodes run in parallel; none waits for the writes of another.
type Reconciler struct {
	Config

	inventories *kinds.InventoryReader
	// failures delays nodes that could not be published. The work queue's rate
	// limiter can't do that: objects that a failed attempt wrote wake the controller.
	failures *pauses
	// contests paces the attempts to delete the slices of a driver that writes them
	// again.
	contests      *pauses
	registrations *registrations

	mu              sync.Mutex
	publishRequests map[string]publishRequest
	// evicted is when foreign slices of a node were last deleted.
	evicted map[string]time.Time
	// unseen has the nodes whose slices were written, and haven't been seen in the cache.
	unseen map[string]bool
}

// New returns a Reconciler that remembers nothing yet.
func New(c Config) *Reconciler {
	c.Slices = countedSlices{c.Slices, newWrites(c.Metrics)}
	return &Reconciler{
		Config: c, inventories: kinds.NewInventoryReader(c.Client, c.Reader, c.Clock),
		failures:        newPauses(c.Clock, undone.FirstRetryDelay, undone.MaxRetryDelay),
		contests:        newPauses(c.Clock, firstContest, maxContest),
		registrations:   newRegistrations(c.Clock, c.Leads),
		publishRequests: make(map[string]publishRequest), evicted: make(map[string]time.Time), unseen: make(map[string]bool),
	}
}

// publishRequest is a number that was raised in an inventory's spec.publishRequest and
// whose answer has not been used yet.
type publishRequest struct {
	inventory types.UID
	number    int64
	raised    time.Time
}

// answerWithin is how long a plugin that is registered takes to answer a
// publishRequest, at most. It watches its inventory. It usually answers within milliseconds.
const answerWithin = 30 * time.Second

// Reconcile brings one node's slices in line. In a steady state it reads the
// caches and writes nothing.
func (n *Reconciler) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	result, err := n.reconcile(ctx, r)
	left, err := undone.Wait(err)
	if err != nil {
		return reconcile.Result{}, err
	}
	result.RequeueAfter = undone.Sooner(result.RequeueAfter, left)
	return result, nil
}

func (n *Reconciler) reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	inv, err := n.inventories.Get(ctx, r.Name)
	switch {
	case err != nil:
		return reconcile.Result{}, err
	case inv == nil:
		n.forgetNode(r.Name)
	}
	if left := n.inventories.UntilReported(inv); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	if !plan.Publishable(inv) {
		return n.converge(ctx, r.Name, inv, plan.Decision{})
	}
	if decision.Owner(inv).UID == "" {
		return n.withdrawUnowned(ctx, inv)
	}
	// Read the clock before the decision does: a turn that begins in between would be missed.
	wait := plan.UntilNextTurn(inv, n.Clock.Now())
	result, err := n.offer(ctx, inv)
	result.RequeueAfter = undone.Sooner(result.RequeueAfter, wait)
	return result, err
}

// offer decides what a node offers, and brings the inventory and the slices in line.
func (n *Reconciler) offer(ctx context.Context, inv *v1alpha1.GPUInventory) (reconcile.Result, error) {
	in, err := n.Planner.Input(ctx, inv)
	switch {
	case errors.Is(err, plan.ErrNodeUnknown):
		return reconcile.Result{}, nil
	case err != nil:
		return reconcile.Result{}, err
	}
	if last, unchanged := n.Planner.Unchanged(inv.Name, in); unchanged {
		if done, left, err := n.isDone(ctx, inv, last); done || err != nil {
			return reconcile.Result{RequeueAfter: left}, err
		}
	}
	d, err := n.Planner.Decide(ctx, inv, in)
	if err != nil {
		return reconcile.Result{}, err
	}
	wait, err := n.writeInventory(ctx, inv, d.Account.Settings)
	if err != nil {
		return reconcile.Result{}, err
	}
	result, err := n.converge(ctx, inv.Name, inv, d)
	result.RequeueAfter = undone.Sooner(result.RequeueAfter, wait)
	return result, err
}

// writeInventory writes to a node's inventory what was decided. It returns how long to wait
// with a write that somebody else undoes; nothing else waits for that.
func (n *Reconciler) writeInventory(ctx context.Context, inv *v1alpha1.GPUInventory, settings []v1alpha1.GPUSpec) (wait time.Duration, err error) {
	if wait, err = undone.Wait(n.endDoubleAllocation(ctx, inv)); err != nil {
		return 0, err
	}
	left, err := undone.Wait(n.writeSettings(ctx, inv, settings))
	return undone.Sooner(wait, left), err
}

// isDone reports whether nothing is left to do for the last decision on a node, which still
// holds: it has been carried out, or waits for the plugin's answer, for at most the time wait.
// Most events are of such nodes, because every write of the controller leads to one. It checks
// ignored taints, because they depend on claims on which decisions don't depend.
func (n *Reconciler) isDone(ctx context.Context, inv *v1alpha1.GPUInventory, last plan.Account) (done bool, wait time.Duration, err error) {
	if n.isContested(inv) || !equality.Semantic.DeepEqual(inv.Spec.GPUs, last.Settings) {
		return false, 0, nil
	}
	if wait := n.untilAnswered(inv); wait > 0 {
		return true, wait, nil
	}
	cached, err := n.Slices.Cached(inv.Name)
	if err != nil {
		return false, 0, err
	}
	if last.Pool == "" {
		return len(cached.Ours) == 0, 0, nil
	}
	since, published := n.Planner.PublishedSince(inv.Name)
	if !published || len(cached.Foreign) > 0 || publish.Fingerprint(cached.Ours) != last.Pool || !n.isOurs(cached.Ours) {
		return false, 0, nil
	}
	n.recordSeen(inv.Name)
	return true, 0, n.checkIgnoredTaints(ctx, inv, last.Blocked, since)
}

// converge replaces the slices of a node if the cached ones aren't those of the decision.
func (n *Reconciler) converge(ctx context.Context, node string, inv *v1alpha1.GPUInventory, d plan.Decision) (reconcile.Result, error) {
	cached, err := n.Slices.Cached(node)
	if err != nil {
		return reconcile.Result{}, err
	}
	withdrawn, equal := len(d.Pool) == 0, publish.Equal(cached.Ours, d.Pool)
	since := n.Planner.RecordPublished(node, equal && !withdrawn, n.Clock.Now())
	if inv != nil && inv.Status.HasForeignSlices() {
		return n.contest(ctx, inv, cached)
	}
	if withdrawn {
		n.forget(node)
		n.failures.forget(node)
	}
	if equal && n.isOurs(cached.Ours) && (withdrawn || len(cached.Foreign) == 0) {
		n.recordSeen(node)
		left, err := n.judgeOverwritten(ctx, inv)
		return reconcile.Result{RequeueAfter: left}, errors.Join(err, n.checkIgnoredTaints(ctx, inv, d.Account.Blocked, since))
	}
	if left := n.untilWritten(node, d); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	current, err := n.current(ctx, node, cached)
	if err != nil {
		return reconcile.Result{}, err
	}
	return n.replaceSlices(ctx, node, inv, current, d)
}

// untilWritten returns how long to wait before the slices are written, because that has failed,
// or was undone by somebody else. A withdrawal doesn't wait for either.
func (n *Reconciler) untilWritten(node string, d plan.Decision) time.Duration {
	if len(d.Pool) == 0 {
		return 0
	}
	return max(n.failures.left(node), n.Writes.Left(slicesOf(node), d.Account.Pool))
}

// current returns the node's slices as the API server has them. It doesn't list them where
// the cache has none and isn't missing any that this controller wrote: while others write, the
// server takes up to 100 ms for a list, until its cache is as new as etcd.
//
// The server may have slices that the cache lacks, written by the controller that led
// before, say. Slices have fixed names, and the first with devices has the same name in
// every pool, so that the server refuses to create it, and no device is offered twice; the
// next attempt lists. Another driver's slices stay beside ours until the cache has them, as
// if they had been written just after a list.
func (n *Reconciler) current(ctx context.Context, node string, cached publish.Found) (publish.Found, error) {
	n.mu.Lock()
	unseen := n.unseen[node]
	n.mu.Unlock()
	if len(cached.Ours) == 0 && len(cached.Foreign) == 0 && !unseen {
		return cached, nil
	}
	return n.Slices.Live(ctx, node)
}

// recordSeen records that the cache has the slices that the node should have, or none where
// it should have none. An answer that was asked for before has no meaning then.
func (n *Reconciler) recordSeen(node string) {
	n.forget(node)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.unseen, node)
}

// withdrawUnowned withdraws the slices of a node whose inventory isn't owned by the Node:
// new ones would outlive the Node, and those that are there would say for ever what the
// inventory said when it was owned. It returns a terminal error once they are gone.
func (n *Reconciler) withdrawUnowned(ctx context.Context, inv *v1alpha1.GPUInventory) (reconcile.Result, error) {
	if result, err := n.converge(ctx, inv.Name, inv, plan.Decision{}); err != nil || result.RequeueAfter > 0 {
		return result, err
	}
	return reconcile.Result{}, reconcile.TerminalError(fmt.Errorf(
		"the GPUInventory %s is not owned by Node %s: nothing is published for it; delete it, and the node's plugin creates it again", inv.Name, inv.Name))
}

// writeSettings writes the policies' settings for the node to the inventory, unless
// they are there. The patch leaves the rest of the spec as it is.
func (n *Reconciler) writeSettings(ctx context.Context, inv *v1alpha1.GPUInventory, settings []v1alpha1.GPUSpec) error {
	if equality.Semantic.DeepEqual(inv.Spec.GPUs, settings) {
		return nil
	}
	before := inv.DeepCopy()
	times, err := n.Writes.Do(settingsOf(inv.Name), undone.Content(settings), func() error {
		inv.Spec.GPUs = settings
		return client.IgnoreNotFound(n.Client.Patch(ctx, inv, client.MergeFrom(before)))
	})
	if err != nil {
		return fmt.Errorf("write spec.gpus of GPUInventory %s: %w", inv.Name, err)
	}
	klog.FromContext(ctx).Info("Wrote the policies' settings for the node", "gpus", len(settings))
	return n.reportUndone(ctx, inv, times, "spec.gpus of this GPUInventory is changed", nil)
}

// raisePublishRequest raises the number of the node's publishRequest, unless one is under
// way. If that one wasn't answered in time, it calls setSilent.
func (n *Reconciler) raisePublishRequest(ctx context.Context, inv *v1alpha1.GPUInventory) (reconcile.Result, error) {
	if r, ok := n.underWay(inv); ok {
		if left := n.untilAnswered(inv); left > 0 {
			return reconcile.Result{RequeueAfter: left}, nil
		}
		return reconcile.Result{}, n.setSilent(ctx, inv, r.number)
	}
	now, number := n.Clock.Now(), max(inv.Spec.PublishRequest, inv.Status.PublishResponse)+1
	// Only on what the cache showed: the number may have been used since, by the
	// controller before this one.
	patch := fmt.Appendf(nil, `{"metadata":{"resourceVersion":%q},"spec":{"publishRequest":%d}}`, inv.ResourceVersion, number)
	asked := inventoryMetadata(inv.Name)
	err := n.Client.Patch(ctx, asked, client.RawPatch(types.MergePatchType, patch))
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return reconcile.Result{}, nil // gone or changed since; an event for it is on its way
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("raise publishRequest of GPUInventory %s: %w", inv.Name, err)
	}
	n.Planner.Keep(inv, asked.ResourceVersion)
	klog.FromContext(ctx).Info("Asked the node's plugin whether to publish", "publishRequest", number)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.publishRequests[inv.Name] = publishRequest{inventory: inv.UID, number: number, raised: now}
	return reconcile.Result{RequeueAfter: answerWithin}, nil
}

// inventoryMetadata names an inventory for a patch to which the server answers with the
// metadata alone, because the status is large and isn't needed.
func inventoryMetadata(node string) *metav1.PartialObjectMetadata {
	inv := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: node}}
	inv.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("GPUInventory"))
	return inv
}

// untilAnswered returns how much longer to wait for the answer to the request under way.
// It is 0 or less if there is nothing to wait for.
func (n *Reconciler) untilAnswered(inv *v1alpha1.GPUInventory) time.Duration {
	r, ok := n.underWay(inv)
	if !ok || inv.Status.PublishResponse >= r.number {
		return 0
	}
	return r.raised.Add(answerWithin).Sub(n.Clock.Now())
}

// lives reports whether the plugin is known to live: it has answered the request under
// way, or was just registered for the first time where nothing is published.
func (n *Reconciler) lives(inv *v1alpha1.GPUInventory, current publish.Found) bool {
	return n.answered(inv) || len(current.Ours) == 0 && len(current.Foreign) == 0 && n.registrations.justNow(inv)
}

// answered reports whether the plugin has answered the request under way.
func (n *Reconciler) answered(inv *v1alpha1.GPUInventory) bool {
	r, ok := n.underWay(inv)
	return ok && inv.Status.PublishResponse >= r.number
}

// underWay returns the request under way, if there is one. A request to an inventory
// that has since been deleted and created again doesn't count.
func (n *Reconciler) underWay(inv *v1alpha1.GPUInventory) (publishRequest, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r, ok := n.publishRequests[inv.Name]
	return r, ok && r.inventory == inv.UID
}

// forgetNode drops everything that is remembered of a node without an inventory.
func (n *Reconciler) forgetNode(node string) {
	n.Planner.Forget(node)
	n.failures.forget(node)
	n.contests.forget(node)
	n.registrations.forget(node)
	n.Writes.Forget(writesOf(node)...)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.publishRequests, node)
	delete(n.evicted, node)
	delete(n.unseen, node)
}

// forget forgets that the plugin has answered, or was registered for the first time.
func (n *Reconciler) forget(node string) {
	n.registrations.forget(node)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.publishRequests, node)
}
