package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// policyReconciler writes the statuses of SharingPolicies. It reads all policies and
// nodes at once, because the verdict on each GPU depends on all policies; there
// is one request for everything.
type policyReconciler struct {
	clock   clock.PassiveClock
	client  client.Client
	planner *plan.Planner
	slices  interface {
		Cached(node string) (publish.Found, error)
	}
	// writes paces statuses that somebody else changes.
	writes *undone.Writes
	// warn writes an event about a policy.
	warn func(s *v1alpha1.SharingPolicy, reason, message string)
	// next is when to judge again at the earliest.
	next time.Time
}

// A judgement reads all nodes, and each change of a node causes one. So a pause of judgePause
// times its duration follows, at most maxJudgePause. It follows a failure, too: the queue's
// own delays would grow so long that a status is written too late.
const (
	judgePause    = 10
	maxJudgePause = 5 * time.Second
)

// Reconcile writes the statuses that changed.
func (p *policyReconciler) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	begun := p.clock.Now()
	if left := p.next.Sub(begun); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	defer func() { p.next = p.clock.Now().Add(min(judgePause*p.clock.Since(begun), maxJudgePause)) }()
	var list v1alpha1.SharingPolicyList
	if err := p.client.List(ctx, &list); err != nil {
		return reconcile.Result{}, fmt.Errorf("list SharingPolicies: %w", err)
	}
	if len(list.Items) == 0 {
		return reconcile.Result{}, nil
	}
	common, err := p.planner.Common(ctx)
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
func (p *policyReconciler) write(ctx context.Context, s *v1alpha1.SharingPolicy, o *outcome) error {
	if o == nil {
		return nil // created in the meantime; its event will follow
	}
	status := o.status(s)
	if equality.Semantic.DeepEqual(s.Status, status) {
		return nil
	}
	before := s.Status.Problems
	times, err := p.writes.Do("policy/"+string(s.UID), undone.Content(untimed(status)), func() error {
		s.Status = status
		return client.IgnoreNotFound(p.client.Status().Update(ctx, s))
	})
	if err != nil {
		return fmt.Errorf("write the status of SharingPolicy %s: %w", s.Name, err)
	}
	if times == undone.Fight {
		p.warn(s, v1alpha1.ConditionOverwritten, explainUndone("the status of this SharingPolicy is changed", ""))
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
func (p *policyReconciler) judgedNodes(ctx context.Context, common plan.CommonInput) ([]judgedNode, error) {
	var inventories v1alpha1.GPUInventoryList
	if err := p.client.List(ctx, &inventories, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list GPUInventories: %w", err)
	}
	var out []judgedNode
	for i := range inventories.Items {
		inv := &inventories.Items[i]
		a, err := p.planner.Account(ctx, common, inv)
		switch {
		case errors.Is(err, plan.ErrNodeUnknown):
			continue
		case err != nil:
			return nil, err
		}
		cached, err := p.slices.Cached(inv.Name)
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
	case !publishable(inv):
		return "It isn't offered, because its node's plugin isn't registered with the kubelet."
	case (a.Pool != "" || len(cached.Ours) == 0) && a.Pool == publish.Fingerprint(cached.Ours) && len(cached.Foreign) == 0:
		return ""
	case ready != nil && ready.Reason == v1alpha1.ReasonPluginSilent:
		return "It isn't offered, because its node's plugin doesn't answer (condition Ready of the GPUInventory)."
	}
	return "It isn't offered as planned yet: its node's ResourceSlices have not been written; the controller's log says why if it lasts."
}

// outcome is the result of one policy.
type outcome struct {
	// refused is the error in the spec, nil if there is none.
	refused error
	// form that is in force; nil: none.
	form     *v1alpha1.AcceptedForm
	nodes    []v1alpha1.ServedNode
	gpus     int32
	lost     map[string]int32 // to whom, how many
	hidden   bool             // GPUs aren't published
	unsafe   bool             // GPUs are offered as less than the plan
	waiting  []v1alpha1.WaitingDevice
	withheld []v1alpha1.WithheldGPU
	problems map[string]*v1alpha1.PolicyProblem // by message
	// besides are the problems that leave the plan applied: the whole GPU isn't offered
	// beside its shares.
	besides map[string]bool
	// events are the problems that last until someone acts, with the reasons of their
	// events.
	events map[string]string
	// profiles that the plan names: those that some GPU has, and on how many each
	// is missing.
	found   map[string]bool
	missing map[string]int32
}

// judge computes the outcome of every policy, from nodes sorted by name.
func judge(r *plan.Rules, nodes []judgedNode) map[string]*outcome {
	out := make(map[string]*outcome, len(r.Accepted)+len(r.Refused))
	for _, a := range r.Accepted {
		out[a.Policy.Name] = &outcome{
			form: a.Form.DeepCopy(), lost: make(map[string]int32), problems: make(map[string]*v1alpha1.PolicyProblem), events: make(map[string]string), besides: make(map[string]bool),
			found: make(map[string]bool), missing: make(map[string]int32),
		}
	}
	for name, err := range r.Refused {
		if out[name] == nil {
			out[name] = &outcome{}
		}
		out[name].refused = err
	}
	for _, n := range nodes {
		for _, g := range n.gpus {
			tally(out, n, g)
		}
		for _, w := range n.withheld {
			if o := out[w.Policy]; o.takesPart() {
				o.withheld = append(o.withheld, v1alpha1.WithheldGPU{Node: n.name, GPU: w.GPU, Message: cut(w.Reason, maxWithheldMessage)})
			}
		}
	}
	return out
}

// tally adds one GPU to the outcomes of its policies. The account may be outdated, and
// name policies that don't exist any more.
func tally(all map[string]*outcome, node judgedNode, g plan.GPU) {
	for name, err := range g.Verdict.Failed {
		if o := all[name]; o.takesPart() {
			o.problem(fmt.Sprintf("It is not selected, because spec.gpuSelector fails on it: %v.", err), node.name, g)
		}
	}
	for _, name := range g.Verdict.Lost {
		if o := all[name]; o.takesPart() {
			o.lost[g.Verdict.Policy]++
		}
	}
	o := all[g.Verdict.Policy]
	if !o.takesPart() {
		return
	}
	for _, profile := range g.Found {
		o.found[profile] = true
	}
	for _, profile := range g.Missing {
		o.missing[profile]++
	}
	if node.unpublished != "" {
		o.hidden = true
		o.problem(node.unpublished, node.name, g)
		return
	}
	o.serve(node.name, g)
}

func (o *outcome) takesPart() bool { return o != nil && o.form != nil }

// serve adds a GPU that is under the policy, of a node whose slices are as planned.
func (o *outcome) serve(node string, g plan.GPU) {
	if g.Devices > 0 {
		o.count(node, g)
	}
	o.unsafe = o.unsafe || g.Unsafe
	for _, w := range g.Leftovers {
		o.waiting = append(o.waiting, v1alpha1.WaitingDevice{Node: node, Device: string(w.Device), Claim: w.Claim})
	}
	for _, message := range g.Problems {
		o.problem(message, node, g)
		o.events[message] = v1alpha1.ReasonProblems
		if g.Unsafe {
			o.events[message] = v1alpha1.ReasonUnsafeScheduler
		}
	}
	if message := g.WithoutWhole; message != "" {
		o.problem(message, node, g)
		o.events[message], o.besides[message] = v1alpha1.ReasonAppliedWithoutWhole, true
	}
}

// count adds a GPU of which there are devices.
func (o *outcome) count(node string, g plan.GPU) {
	o.gpus++
	last := len(o.nodes) - 1
	if last < 0 || o.nodes[last].Node != node {
		o.nodes = append(o.nodes, v1alpha1.ServedNode{Node: node})
		last++
	}
	if n := &o.nodes[last]; len(n.GPUs) < v1alpha1.MaxServedGPUs {
		n.GPUs = append(n.GPUs, string(g.Name))
	}
}

func (o *outcome) problem(message, node string, g plan.GPU) {
	p := o.problems[message]
	if p == nil {
		p = &v1alpha1.PolicyProblem{Message: message, Example: node + "/" + string(g.Name)}
		o.problems[message] = p
	}
	p.GPUs++
}

// misspelt are the profiles that none of the policy's GPUs has.
func (o *outcome) misspelt() []v1alpha1.PolicyProblem {
	var out []v1alpha1.PolicyProblem
	for _, profile := range slices.Sorted(maps.Keys(o.missing)) {
		if !o.found[profile] {
			out = append(out, v1alpha1.PolicyProblem{
				Message: fmt.Sprintf("None of the policy's GPUs has the MIG profile %s; nvidia-smi mig -lgip lists those they have.", profile),
				GPUs:    o.missing[profile],
			})
		}
	}
	return out
}

func (o *outcome) status(s *v1alpha1.SharingPolicy) v1alpha1.SharingPolicyStatus {
	status := v1alpha1.SharingPolicyStatus{ObservedGeneration: s.Generation, Accepted: o.form, Conditions: slices.Clone(s.Status.Conditions)}
	if o.refused != nil {
		message := o.refused.Error() + "; the policy applies to no GPU, because no version of it has been accepted yet"
		if o.form != nil {
			message = fmt.Sprintf("%v; generation %d stays in force until this is corrected or the policy deleted (status.accepted)", o.refused, o.form.Generation)
		}
		set(&status, s, v1alpha1.ConditionAccepted, metav1.ConditionFalse, v1alpha1.ReasonInvalid, message)
	} else {
		set(&status, s, v1alpha1.ConditionAccepted, metav1.ConditionTrue, v1alpha1.ReasonAccepted, "the policy is in force")
	}
	status.Nodes, status.GPUs, status.Served = int32(len(o.nodes)), o.gpus, first(o.nodes, v1alpha1.MaxServedNodes)
	for _, name := range first(slices.Sorted(maps.Keys(o.lost)), v1alpha1.MaxConflicts) {
		status.Conflicts = append(status.Conflicts, v1alpha1.PolicyConflict{Policy: name, GPUs: o.lost[name]})
	}
	status.WaitingDevices, status.Waiting = int32(countDevices(o.waiting)), first(o.waiting, v1alpha1.MaxWaitingDevices)
	problems := o.misspelt()
	for _, message := range slices.Sorted(maps.Keys(o.problems)) {
		problems = append(problems, *o.problems[message])
	}
	status.Problems = first(problems, v1alpha1.MaxProblems)
	status.WithheldGPUs, status.Withheld = int32(len(o.withheld)), first(o.withheld, v1alpha1.MaxWithheldGPUs)
	o.applied(&status, s)
	return status
}

// countDevices counts each device once, however many claims have it: they are
// next to each other.
func countDevices(waiting []v1alpha1.WaitingDevice) int {
	return len(slices.CompactFunc(slices.Clone(waiting), func(a, b v1alpha1.WaitingDevice) bool { return a.Node == b.Node && a.Device == b.Device }))
}

// applied reports whether all GPUs that the spec selects, and at least one, are
// offered as it plans.
func (o *outcome) applied(status *v1alpha1.SharingPolicyStatus, s *v1alpha1.SharingPolicy) {
	is, reason := metav1.ConditionFalse, v1alpha1.ReasonProblems
	message, besides := o.sentences(status.Problems)
	if o.refused != nil {
		message = append([]string{"The spec isn't in force: see condition Accepted."}, message...)
	}
	if n := int(status.WaitingDevices); n > 0 {
		reason = v1alpha1.ReasonWaiting
		w := status.Waiting[0]
		message = append(message, fmt.Sprintf("Until their claims are gone, %s of the previous plan stay offered; the first is %s of node %s, which claim %s has.",
			plural(n, "device"), w.Device, w.Node, w.Claim))
	}
	if n := int(status.WithheldGPUs); n > 0 {
		if len(message) == 0 {
			reason = v1alpha1.ReasonWithheld
		}
		w := status.Withheld[0]
		message = append(message, fmt.Sprintf("%s can't be used by new claims as planned; the first is %s of node %s (%s).",
			plural(n, "selected GPU"), w.GPU, w.Node, w.Message))
	}
	switch {
	case o.refused != nil:
		reason = v1alpha1.ReasonInvalid
	case o.hidden:
		reason = v1alpha1.ReasonNotPublished
	case o.unsafe:
		reason = v1alpha1.ReasonUnsafeScheduler
	case len(message) > 0:
	case status.GPUs == 0:
		reason, message = v1alpha1.ReasonNoGPUs,
			[]string{"The policy applies to no GPU: its selectors match none, or the policies in status.conflicts take precedence."}
	case len(besides) > 0:
		is, reason = metav1.ConditionTrue, v1alpha1.ReasonAppliedWithoutWhole
	default:
		is, reason, message = metav1.ConditionTrue, v1alpha1.ReasonApplied, []string{"the GPUs are offered as planned"}
	}
	set(status, s, v1alpha1.ConditionApplied, is, reason, strings.Join(append(message, besides...), " "))
}

// sentences describes each problem in a sentence: message has those that keep the plan
// from being applied, besides the others.
func (o *outcome) sentences(problems []v1alpha1.PolicyProblem) (message, besides []string) {
	for _, p := range problems {
		sentence := fmt.Sprintf("On %s: %s", plural(int(p.GPUs), "GPU"), p.Message)
		if o.besides[p.Message] {
			besides = append(besides, sentence)
		} else {
			message = append(message, sentence)
		}
	}
	return message, besides
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// first truncates a list to the limit of a status.
func first[T any](all []T, most int) []T { return all[:min(len(all), most)] }

func set(status *v1alpha1.SharingPolicyStatus, s *v1alpha1.SharingPolicy, condition string, is metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: condition, Status: is, Reason: reason, Message: cut(message, maxMessage), ObservedGeneration: s.Generation,
	})
}

// The most characters of a condition's message, which the API server limits, and of a
// withheld GPU's, of which a status has many.
const (
	maxMessage         = 32768
	maxWithheldMessage = 256
)

// cut shortens a message to at most so many characters.
func cut(message string, most int) string {
	if r := []rune(message); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return message
}
