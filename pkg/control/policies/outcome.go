package policies

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/plan"
)

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
