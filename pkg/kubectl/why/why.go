// Package why is kubectl gpu why: why a pod waits for devices, or isn't started with them, and
// what would change it.
package why

import (
	"context"
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// Explanation is why a pod waits, or isn't started.
type Explanation struct {
	Pod string `json:"pod"`
	// Waits: the pod waits for devices.
	Waits bool `json:"waits"`
	// Text is the reason, and Change what would change it: a sentence each.
	Text   string `json:"text"`
	Change string `json:"change,omitempty"`
	// NotLookedAt are sentences about nodes that don't take the pod, whatever its claims.
	NotLookedAt []string `json:"notLookedAt,omitempty"`
	// Also are sentences about what else is known of a pod that a node doesn't start: the
	// conditions of its GPUs, events of its claims.
	Also []string `json:"also,omitempty"`
	// Reason in detail, if claims of the pod fit nowhere.
	Reason *fit.Reason `json:"reason,omitempty"`
}

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu why.
func Command(o *cluster.Options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why POD",
		Short: "Say why a pod waits for devices or isn't started with them, and what would change it",
		Long: `Say in one sentence why a pod waits for its devices: no device matches, and which
values they have; a taint; a counter or a capacity that other claims have used up; a
quota that refuses the claim. And in another, what would change it. The scheduler's own
allocator judges.

Of a pod that is on a node and hangs in ContainerCreating, or in Terminating, say what
keeps it: what the kubelet and the node's plugin say, conditions of its GPUs, devices that
processes of ended pods still have.`,
		Example: `  kubectl gpu why train-0
  kubectl gpu why train-0 -n team -o json` + terminal.Shown(shown),
		Args: cluster.Exactly("the name of a pod"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return pendingPods(cmd.Context(), o), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cluster.OneOf(o.Output, "", "json", "yaml"); err != nil {
				return err
			}
			return tellWhy(cmd.Context(), o, strings.TrimPrefix(args[0], "pod/"))
		},
	}
	o.AddOutput(cmd, "json or yaml")
	return cmd
}

// pendingPods are the names for a shell to complete.
func pendingPods(ctx context.Context, o *cluster.Options) []string {
	r, err := o.Reader(nil)
	if err != nil {
		return nil
	}
	list, err := r.Kube.CoreV1().Pods(o.CurrentNamespace()).List(ctx, metav1.ListOptions{FieldSelector: "status.phase=Pending", Limit: cluster.PageSize})
	if err != nil {
		return nil
	}
	var out []string
	for i := range list.Items {
		out = append(out, list.Items[i].Name)
	}
	return out
}

// whyParts are the parts of the answer that are missing without a resource.
func whyParts() cluster.Missing {
	return cluster.Missing{cluster.RulesName: cluster.NoRules, cluster.NodesName: cluster.NoNodes, cluster.PodsName: "how much device plugins have left isn't known"}
}

func tellWhy(ctx context.Context, o *cluster.Options, name string) error {
	r, err := o.Reader(whyParts())
	if err != nil {
		return err
	}
	namespace := o.CurrentNamespace()
	pod, err := r.Kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("there is no pod %s in namespace %s: give another one with -n", name, namespace)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("you may not get pods in namespace %s: ask for the verb get on them (%w)", namespace, err)
	case err != nil:
		return fmt.Errorf("get pod %s/%s: %w", namespace, name, err)
	}
	out, err := explain(ctx, r, pod)
	if err != nil {
		return err
	}
	defer r.PrintNotes(o.ErrOut)
	out.Pod = namespace + "/" + name
	if o.Output != "" {
		return terminal.Write(o.Out, o.Output, out)
	}
	terminal.OneLines(&out)
	fmt.Fprintln(o.Out, out.Text)
	if out.Change != "" {
		fmt.Fprintln(o.Out, out.Change)
	}
	for _, text := range out.Also {
		fmt.Fprintln(o.Out, "- "+text)
	}
	if len(out.NotLookedAt) > 0 {
		fmt.Fprintf(o.Out, "Not looked at: %s.\n", strings.Join(out.NotLookedAt, "; "))
	}
	return nil
}

// explain finds out why the pod waits, or isn't started.
func explain(ctx context.Context, r *cluster.Reader, pod *corev1.Pod) (Explanation, error) {
	if out, ok := placed(pod); ok {
		return out, nil
	}
	if pod.Spec.NodeName == "" {
		return whyPending(ctx, r, pod)
	}
	s, err := readStart(ctx, r, pod)
	if err != nil {
		return Explanation{}, err
	}
	return s.explanation(), nil
}

// whyPending finds out why the scheduler doesn't place the pod.
func whyPending(ctx context.Context, r *cluster.Reader, pod *corev1.Pod) (Explanation, error) {
	j, objects, err := r.Judge(ctx, pod.Namespace, pod)
	if err != nil {
		return Explanation{}, err
	}
	claims := j.ClaimsOf(pod, objects.Claims)
	switch {
	case len(claims.Uncreated) > 0:
		return whyUncreated(ctx, r, pod, claims)
	case len(claims.Missing) > 0:
		return Explanation{Waits: true, Text: claims.Missing[0]}, nil
	case len(claims.Waiting) == 0 && len(claims.Allocated) == 0:
		return Explanation{Text: "It has no claims for devices, and waits for something else: " + schedulersWord(pod)}, nil
	}
	nodes, refused := j.Candidates(pod, claims.Allocated)
	whole := wholeNodes(pod, claims.Waiting, objects)
	switch {
	case len(nodes) == 0:
		return Explanation{
			Waits: true, Also: whole, Text: "No node takes it, whatever its claims: " + strings.Join(refused, "; ") + ".",
			Change: "Change the pod's node selector, affinity or tolerations, or the nodes, or wait until other pods end there.",
		}, nil
	case len(claims.Waiting) == 0:
		also, err := conditionsOf(ctx, r, pod, claims.Allocated)
		return Explanation{Text: "All its claims have devices; it waits for something else: " + schedulersWord(pod), Also: also}, err
	}
	r.NoteVersion()
	answer, err := j.Fits(ctx, nodes, claims, 1)
	if err != nil {
		return Explanation{}, err
	}
	if answer.Reason != nil {
		return Explanation{
			Waits: true, Text: answer.Reason.Text, Change: answer.Reason.Change, NotLookedAt: refused, Reason: answer.Reason, Also: whole,
		}, nil
	}
	return fitsNow(pod, answer.Nodes[0]), nil
}

// fitsNow answers for a pod whose claims fit.
func fitsNow(pod *corev1.Pod, at fit.Room) Explanation {
	what, word := "Its claims fit now", schedulersWord(pod)
	if len(at.Devices) == 0 {
		what = "A device plugin has what it needs"
	}
	out := Explanation{
		Text:   fmt.Sprintf("%s, on %s; it waits for something else: %s", what, at.Node, word),
		Change: "If the scheduler's message is of claims, it is old: the scheduler tries again when something changes, or after 5 minutes.",
	}
	if advice := quotaAdvice(word, pod.Namespace); advice != "" { // on the claim for its extended resources
		out.Waits, out.Change = true, advice
	}
	return out
}

// uncreated is the reason of events about claims that aren't created from templates, which
// are about the pod or its PodGroup.
const uncreated = "FailedResourceClaimCreation"

// exceeded finds the ResourceQuota in the API server's message.
var exceeded = regexp.MustCompile(`exceeded quota: ([^,\s]+)`)

// whyUncreated explains why Kubernetes doesn't create claims of the pod from their
// templates.
func whyUncreated(ctx context.Context, r *cluster.Reader, pod *corev1.Pod, claims fit.PodClaims) (Explanation, error) {
	out := Explanation{Waits: true, Text: claims.Missing[0]}
	ofReason := metav1.ListOptions{FieldSelector: "reason=" + uncreated}
	events, err := r.Kube.CoreV1().Events(pod.Namespace).List(ctx, ofReason)
	if apierrors.IsForbidden(err) {
		r.Note("You may not list events in namespace %s: whether Kubernetes tried to create the claim isn't known. "+cluster.AskForList,
			pod.Namespace)
		return out, nil
	}
	if err != nil {
		return out, fmt.Errorf("list events in namespace %s: %w", pod.Namespace, err)
	}
	message := refusal(pod, events.Items)
	if message == "" {
		return out, nil
	}
	message = strings.TrimSuffix(message, ".")
	out.Text = fmt.Sprintf("Kubernetes can't create the claim %s: %s.", claims.Uncreated[0], message)
	out.Change = "Correct the ResourceClaimTemplate, or its name in the pod."
	if advice := quotaAdvice(message, pod.Namespace); advice != "" {
		out.Change = advice
	}
	return out, nil
}

// quotaAdvice returns the remedy for a ResourceQuota that a message names; "" if it names
// none.
func quotaAdvice(message, namespace string) string {
	m := exceeded.FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	return fmt.Sprintf("Raise the ResourceQuota %s in namespace %s, or end pods there that have such devices; "+
		"Kubernetes then tries again.", m[1], namespace)
}

// refusal returns the newest message on claims of the pod or its PodGroup; "" if there is none.
func refusal(pod *corev1.Pod, events []corev1.Event) string {
	var newest *corev1.Event
	for i := range events {
		e := &events[i]
		if e.Reason == uncreated && isAbout(e, pod) && (newest == nil || !when(e).Before(when(newest))) {
			newest = e
		}
	}
	if newest == nil {
		return ""
	}
	_, message, found := strings.Cut(newest.Message, ": ") // "PodResourceClaim NAME: "
	if !found {
		return newest.Message
	}
	return message
}

// isAbout reports whether an event is about the pod or its PodGroup.
func isAbout(e *corev1.Event, pod *corev1.Pod) bool {
	o, group := e.InvolvedObject, pod.Spec.SchedulingGroup
	return o.UID == pod.UID || o.Kind == "PodGroup" && group != nil && group.PodGroupName != nil && o.Name == *group.PodGroupName
}

// placed answers for a pod that the scheduler isn't asked about any more, or not yet.
func placed(pod *corev1.Pod) (Explanation, bool) {
	switch {
	case pod.DeletionTimestamp != nil && pod.Spec.NodeName == "":
		return Explanation{Text: "It is being deleted."}, true
	case pod.DeletionTimestamp == nil && isRejected(pod):
		return rejected(pod), true
	case pod.Spec.NodeName != "" && pod.DeletionTimestamp == nil && hasStarted(pod):
		return Explanation{Text: fmt.Sprintf("It doesn't wait for devices: it is on %s, and its phase is %s.", pod.Spec.NodeName, pod.Status.Phase)}, true
	case len(pod.Spec.SchedulingGates) > 0:
		return Explanation{
			Text:   fmt.Sprintf("The scheduler doesn't look at it: it has the scheduling gate %s.", pod.Spec.SchedulingGates[0].Name),
			Change: "Whoever set the gate has to remove it.",
		}, true
	}
	return Explanation{}, false
}

// rejection begins the message of a pod that the kubelet has rejected, which is final.
const rejection = "Pod was rejected: "

// isRejected reports whether the kubelet has rejected the pod.
func isRejected(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodFailed && pod.Spec.NodeName != "" && strings.HasPrefix(pod.Status.Message, rejection)
}

// rejected answers for a pod that the kubelet has rejected.
func rejected(pod *corev1.Pod) Explanation {
	reason := strings.TrimPrefix(pod.Status.Message, rejection)
	next := "It isn't tried again: delete the pod and create it again, because nothing else does."
	if owner := metav1.GetControllerOf(pod); owner != nil {
		next = fmt.Sprintf("It isn't tried again; %s %s may have made another.", owner.Kind, owner.Name)
	}
	return Explanation{
		Text:   fmt.Sprintf("It has failed: the kubelet of %s rejected it (%s): %s", pod.Spec.NodeName, pod.Status.Reason, sentence(reason)),
		Change: (&start{pod: pod}).remedy(reason, next),
	}
}

// hasStarted reports whether the pod has ended, or runs with all its containers.
func hasStarted(pod *corev1.Pod) bool {
	waits := func(c corev1.ContainerStatus) bool { return c.State.Waiting != nil }
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed ||
		pod.Status.Phase == corev1.PodRunning && !slices.ContainsFunc(pod.Status.ContainerStatuses, waits)
}

// schedulersWord is the scheduler's message about the pod.
func schedulersWord(pod *corev1.Pod) string {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Message != "" {
			return "the scheduler says: " + c.Message
		}
	}
	return "the scheduler has said nothing of it yet."
}

// Now says why a pod waits, with a fresh look at the cluster.
func Now(ctx context.Context, o *cluster.Options, namespace, name string) (Explanation, error) {
	r, err := o.Reader(whyParts())
	if err != nil {
		return Explanation{}, err
	}
	pod, err := r.Kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return Explanation{Text: "The pod is gone."}, nil
	case apierrors.IsForbidden(err):
		return Explanation{}, fmt.Errorf("you may not get pods in namespace %s: ask for the verb get on them", namespace)
	case err != nil:
		return Explanation{}, fmt.Errorf("get pod %s/%s: %w", namespace, name, err)
	}
	return explain(ctx, r, pod)
}
