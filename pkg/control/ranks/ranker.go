package ranks

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
	"github.com/tessera-dra/tessera/pkg/rank"
)

// Options are the user's.
type Options struct {
	// Hard is how many unused nodes of each pool's reserve are kept for pods that tolerate it.
	Hard int
	// PoolLabel is the label of Nodes whose values are the pools. Empty: all nodes are one pool.
	PoolLabel string
	// Pause is how long a higher rank must have been wanted before it is written.
	Pause time.Duration
}

// Config has what a Ranker works with. All informers must run, and be filled.
type Config struct {
	Options
	Nodes       typedcorev1.NodeInterface
	Cache       client.Reader // of inventories
	Inventories *kinds.InventoryReader
	Cluster     *Cluster
	Slices      *publish.Publisher
	Claims      *claims.Index
	Writes      *undone.Writes
	Metrics     prometheus.Registerer
	Clock       clock.PassiveClock
}

// How many Nodes may be written in a second, and at once.
const (
	writesPerSecond = 50
	writesAtOnce    = 50
)

const (
	// full is how long writes wait that would have been too many at once.
	full = 100 * time.Millisecond
	// firstRetry is when a write is tried again that failed. If it was because the node's taints
	// have changed, their event comes earlier.
	firstRetry = time.Second
)

// Ranker keeps the taints of all nodes equal to their ranks. Its calls must not overlap.
type Ranker struct {
	Config
	pace    rank.Pace
	rate    flowcontrol.PassiveRateLimiter
	retries workqueue.TypedRateLimiter[string] // by node
	metrics *metrics
	// nodes are those with GPUs, or with taints of ours; nil before the first call.
	nodes map[string]*node
	// next is when there is something to write without an event; zero: never.
	next time.Time
	// timer is the only request that is requeued for next, at each of its reconciles: an event for
	// it replaces its timer in the queue. Were all requeued, a busy cluster would have all its
	// nodes read again for each rank that is raised.
	timer reconcile.Request
}

// node is what is known of a Node.
type node struct {
	rank.Node // its Decided needn't be written yet
	cpu       int64
	taints    []corev1.Taint
	// version is the Node's as the cache had it, and replaced the one that the cache had after the
	// last write, with the taints of before: while it has that one, it doesn't know of the write
	// yet.
	version, replaced string
	// retry is when a write that has failed is tried again, unless the taints change before.
	retry time.Time
}

// New returns a Ranker that knows no node yet.
func New(c Config) *Ranker {
	return &Ranker{
		Config: c, pace: rank.Pace{Pause: c.Pause}, metrics: newMetrics(c.Metrics),
		rate:    flowcontrol.NewTokenBucketPassiveRateLimiter(writesPerSecond, writesAtOnce),
		retries: workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, undone.MaxRetryDelay),
	}
}

// Reconcile reads one node again and, if it differs or a write is due, brings the taints of all
// nodes in line.
func (r *Ranker) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	differs, err := r.read(ctx, req.Name)
	if err != nil {
		return reconcile.Result{}, err
	}
	now, next := r.Clock.Now(), r.next
	if differs || !next.IsZero() && !now.Before(next) {
		r.write(ctx, now)
	}
	if unchanged := r.next.Equal(next); r.next.IsZero() || unchanged && req != r.timer {
		return reconcile.Result{}, nil
	}
	r.timer = req
	return reconcile.Result{RequeueAfter: max(r.next.Sub(now), time.Millisecond)}, nil
}

// read reads a node, or all of them the first time: a rank depends on the other nodes. It reports
// whether any differs from what was known.
func (r *Ranker) read(ctx context.Context, name string) (bool, error) {
	if r.nodes != nil {
		return r.readNode(ctx, name)
	}
	r.nodes = make(map[string]*node)
	for _, name := range r.Cluster.Nodes.GetStore().ListKeys() {
		if _, err := r.readNode(ctx, name); err != nil {
			r.nodes = nil
			return false, err
		}
	}
	return true, nil
}

func (r *Ranker) readNode(ctx context.Context, name string) (differs bool, err error) {
	before := r.nodes[name]
	now, known, err := r.facts(ctx, name)
	if err != nil {
		return false, err
	}
	if !known {
		delete(r.nodes, name)
		r.pace.Forget(name)
		r.retries.Forget(name)
		return before != nil, nil
	}
	switch {
	case before == nil:
		now.Decided = rank.Of(now.taints)
	case before.replaced == now.version:
		now.Decided, now.taints, now.replaced = before.Decided, before.taints, before.replaced
	default:
		now.Decided = before.Decided
	}
	r.nodes[name] = now
	if before == nil || !slices.EqualFunc(before.taints, now.taints, sameTaint) {
		return true, nil
	}
	now.retry = before.retry
	return before.Node != now.Node, nil
}

func sameTaint(a, b corev1.Taint) bool { return a.MatchTaint(&b) && a.Value == b.Value }

// write writes the ranks that differ and are due: first the lower ones, so that nodes in use fill
// up. It sets when there is something to write next. A node that can't be written waits by itself,
// and doesn't keep the others.
func (r *Ranker) write(ctx context.Context, now time.Time) {
	due := r.due(now)
	for i, n := range due {
		if ctx.Err() != nil {
			return
		}
		if !r.rate.TryAccept() {
			klog.FromContext(ctx).V(4).Info("Ranks wait, because many are written", "nodes", len(due)-i)
			r.after(now, full)
			break
		}
		if err := r.taint(ctx, n); err != nil {
			r.retryLater(ctx, n, err, now)
		}
	}
}

// retryLater sets when a write that has failed is tried again. The server says Invalid if the
// taints aren't those that were read any more, but also if an admission policy refuses the write.
func (r *Ranker) retryLater(ctx context.Context, n *node, err error, now time.Time) {
	logger := klog.FromContext(ctx).WithValues("node", n.Name)
	first := r.retries.NumRequeues(n.Name) == 0
	left := r.retries.When(n.Name)
	n.retry = now.Add(left)
	r.after(now, left)
	if first && (apierrors.IsInvalid(err) || apierrors.IsConflict(err)) {
		logger.V(2).Info("A node's rank is written later, because its taints have changed", "reason", err.Error())
		return
	}
	logger.Error(err, "Can't write a node's rank", "nextAttempt", left)
}

// due decides the ranks of all nodes and returns the nodes whose taints are to be changed now.
func (r *Ranker) due(now time.Time) []*node {
	r.next = time.Time{}
	want := r.decide()
	var due []*node
	for name, n := range r.nodes {
		w, ok := want[name]
		if !ok {
			continue // it is away
		}
		n.Decided = w
		written := rank.Of(n.taints)
		isDue, after := r.pace.Due(name, written, w, now)
		if _, differs := w.Apply(n.taints); written == w && differs {
			isDue = true // somebody removed one and added another
		}
		if isDue {
			after = max(n.retry.Sub(now), r.Writes.Left(n.key(), n.content()))
		}
		if after > 0 {
			r.after(now, after)
		} else if isDue {
			due = append(due, n)
		}
	}
	lower := func(n *node) int {
		if n.Decided.Relaxes(rank.Of(n.taints)) {
			return 0
		}
		return 1
	}
	slices.SortFunc(due, func(a, b *node) int { return cmp.Or(lower(a)-lower(b), cmp.Compare(a.Name, b.Name)) })
	return due
}

func (r *Ranker) decide() map[string]rank.Rank {
	all := make([]rank.Node, 0, len(r.nodes))
	for name, n := range r.nodes {
		of := n.Node
		of.FreeCPU = n.cpu - r.Cluster.CPU.used(name)
		all = append(all, of)
	}
	want := rank.Decide(all, r.Hard)
	r.metrics.show(all, want)
	return want
}

// after sets that there is something to write after a time.
func (r *Ranker) after(now time.Time, d time.Duration) {
	if at := now.Add(d); r.next.IsZero() || at.Before(r.next) {
		r.next = at
	}
}

// key is what Writes knows the node's taints by, and content what it compares.
func (n *node) key() string     { return "ranks/" + n.Name }
func (n *node) content() string { return fmt.Sprint(n.Decided.Taints, n.Decided.Hard) }

// taint writes the rank of a node.
func (r *Ranker) taint(ctx context.Context, n *node) error {
	taints, _ := n.Decided.Apply(n.taints)
	err := replaceTaints(ctx, r.Nodes, n.Name, n.taints, taints)
	if apierrors.IsNotFound(err) {
		return nil // the Node is gone
	}
	if err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Changed the node's rank", "node", n.Name, "rank", n.Decided.String())
	r.Writes.Record(n.key(), n.content())
	r.retries.Forget(n.Name)
	r.pace.Forget(n.Name)
	n.replaced = ""
	if cached, ok := r.cached(n.Name); ok && slices.EqualFunc(cached.Spec.Taints, n.taints, sameTaint) {
		n.replaced = cached.ResourceVersion
	}
	n.taints = taints
	r.metrics.writes.Inc()
	return nil
}
