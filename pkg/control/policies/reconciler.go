// Package policies writes the statuses of SharingPolicies: where each is in force, and which parts
// of its plan can't be carried out.
package policies

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// Config has what a Reconciler works with.
type Config struct {
	Client  client.Client // reads come from the cache
	Planner *plan.Planner
	Slices  *publish.Publisher
	// Writes paces statuses that somebody else changes.
	Writes *undone.Writes
	Events events.EventRecorder
	Clock  clock.PassiveClock
}

// Reconciler writes the statuses of SharingPolicies. It reads all policies and nodes at once,
// because the verdict on each GPU depends on all policies; there is one request for everything.
type Reconciler struct {
	Config

	// next is when to judge again at the earliest.
	next time.Time
}

// New returns a Reconciler.
func New(c Config) *Reconciler { return &Reconciler{Config: c} }

// A judgement reads all nodes, and each change of a node causes one. So a pause of judgePause
// times its duration follows, at most maxJudgePause. It follows a failure, too: the queue's
// own delays would grow so long that a status is written too late.
const (
	judgePause    = 10
	maxJudgePause = 5 * time.Second
)

// Reconcile writes the statuses that changed.
func (p *Reconciler) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	begun := p.Clock.Now()
	if left := p.next.Sub(begun); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	defer func() { p.next = p.Clock.Now().Add(min(judgePause*p.Clock.Since(begun), maxJudgePause)) }()
	var list v1alpha1.SharingPolicyList
	if err := p.Client.List(ctx, &list); err != nil {
		return reconcile.Result{}, fmt.Errorf("list SharingPolicies: %w", err)
	}
	if len(list.Items) == 0 {
		return reconcile.Result{}, nil
	}
	common, err := p.Planner.Common(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	nodes, err := p.judgedNodes(ctx, common)
	if err != nil {
		return reconcile.Result{}, err
	}
	all := judge(common.Rules, nodes)
	var errs []error
	var wait time.Duration
	for i := range list.Items {
		left, err := undone.Wait(p.write(ctx, &list.Items[i], all[list.Items[i].Name]))
		wait = undone.Sooner(wait, left)
		if apierrors.IsConflict(err) {
			continue // the cache is outdated; the event of the newer object will follow
		}
		errs = append(errs, err)
	}
	return reconcile.Result{RequeueAfter: wait}, errors.Join(errs...)
}

// write stores a status that changed.
func (p *Reconciler) write(ctx context.Context, s *v1alpha1.SharingPolicy, o *outcome) error {
	if o == nil {
		return nil // created in the meantime; its event will follow
	}
	status := o.status(s)
	if equality.Semantic.DeepEqual(s.Status, status) {
		return nil
	}
	before := s.Status.Problems
	times, err := p.Writes.Do("policy/"+string(s.UID), undone.Content(untimed(status)), func() error {
		s.Status = status
		return client.IgnoreNotFound(p.Client.Status().Update(ctx, s))
	})
	if err != nil {
		return fmt.Errorf("write the status of SharingPolicy %s: %w", s.Name, err)
	}
	if times == undone.Fight {
		p.warn(s, v1alpha1.ConditionOverwritten, undone.Explain("the status of this SharingPolicy is changed", ""))
	}
	accepted := meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionAccepted)
	klog.FromContext(ctx).Info("Judged a SharingPolicy", "policy", s.Name, "accepted", accepted.Status, "reason", accepted.Reason,
		"nodes", status.Nodes, "gpus", status.GPUs, "waiting", status.WaitingDevices, "problems", len(status.Problems))
	for _, problem := range status.Problems {
		known := slices.ContainsFunc(before, func(b v1alpha1.PolicyProblem) bool { return b.Message == problem.Message })
		if reason, ok := o.events[problem.Message]; ok && !known {
			p.warn(s, reason, problem.Message)
		}
	}
	return nil
}

// warn writes an event about a policy.
func (p *Reconciler) warn(s *v1alpha1.SharingPolicy, reason, message string) {
	p.Events.Eventf(s, nil, corev1.EventTypeWarning, reason, "Offer", "%s", message)
}

// untimed returns a status without the times of its conditions, which change when somebody
// else has changed the conditions.
func untimed(status v1alpha1.SharingPolicyStatus) v1alpha1.SharingPolicyStatus {
	status.Conditions = slices.Clone(status.Conditions)
	for i := range status.Conditions {
		status.Conditions[i].LastTransitionTime = metav1.Time{}
	}
	return status
}

// judgedNode is a node with the decisions about its GPUs.
type judgedNode struct {
	name string
	gpus []plan.GPU
	// withheld are the node's GPUs that aren't offered.
	withheld []plan.WithheldGPU
	// unpublished is why the node's devices aren't published; empty where they are.
	unpublished string
}

// judgedNodes returns all nodes, sorted by name.
func (p *Reconciler) judgedNodes(ctx context.Context, common plan.CommonInput) ([]judgedNode, error) {
	var inventories v1alpha1.GPUInventoryList
	if err := p.Client.List(ctx, &inventories, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list GPUInventories: %w", err)
	}
	var out []judgedNode
	for i := range inventories.Items {
		inv := &inventories.Items[i]
		a, err := p.Planner.Account(ctx, common, inv)
		switch {
		case errors.Is(err, plan.ErrNodeUnknown):
			continue
		case err != nil:
			return nil, err
		}
		cached, err := p.Slices.Cached(inv.Name)
		if err != nil {
			return nil, err
		}
		out = append(out, judgedNode{name: inv.Name, gpus: a.GPUs, withheld: a.Withheld, unpublished: unpublished(inv, a, cached)})
	}
	slices.SortFunc(out, func(a, b judgedNode) int { return cmp.Compare(a.name, b.name) })
	return out, nil
}

// unpublished returns the reason why a node's offer can't be allocated; empty
// if it can.
func unpublished(inv *v1alpha1.GPUInventory, a plan.Account, cached publish.Found) string {
	ready := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionReady)
	switch {
	case meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionConflicting):
		return "It isn't offered, because another driver serves its node's GPUs (condition Conflicting of the GPUInventory)."
	case !plan.Publishable(inv):
		return "It isn't offered, because its node's plugin isn't registered with the kubelet."
	case (a.Pool != "" || len(cached.Ours) == 0) && a.Pool == publish.Fingerprint(cached.Ours) && len(cached.Foreign) == 0:
		return ""
	case ready != nil && ready.Reason == v1alpha1.ReasonPluginSilent:
		return "It isn't offered, because its node's plugin doesn't answer (condition Ready of the GPUInventory)."
	}
	return "It isn't offered as planned yet: its node's ResourceSlices have not been written; the controller's log says why if it lasts."
}
