package why

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/obstacle"
)

// explanation says what keeps the pod: the cause, and what else is known.
func (s *start) explanation() Explanation {
	conditions := s.conditions()
	out := s.cause(conditions)
	out.Also = slices.Concat(texts(conditions), s.claimsEvents(), s.pluginsEvents(conditions))
	out.Also = slices.DeleteFunc(out.Also, func(text string) bool { return text == out.Text })
	return out
}

// cause returns the first cause that is found. A node or a plugin that is away comes first: while
// it is, nothing else can be done about the pod.
func (s *start) cause(conditions []condition) Explanation {
	if out, ok := s.nodeAway(); ok {
		return out
	}
	switch {
	case s.pod.DeletionTimestamp != nil:
		return s.ending()
	case s.isPrepared():
		return s.container()
	}
	if out, ok := s.pluginAway(); ok {
		return out
	}
	if out, ok := s.kubeletsWord(); ok {
		return out
	}
	if len(conditions) > 0 {
		return Explanation{Waits: true, Text: conditions[0].text, Change: "How it ends: " + cluster.Documents + "health.md#causes-and-effects"}
	}
	return s.unknown()
}

// isPrepared reports whether the pod's claims are prepared: the kubelet does that before it
// makes the pod's sandbox.
func (s *start) isPrepared() bool {
	for _, c := range s.pod.Status.Conditions {
		if c.Type == corev1.PodReadyToStartContainers {
			return c.Status == corev1.ConditionTrue
		}
	}
	return s.pod.Status.Phase == corev1.PodRunning
}

// nodeAway answers for a node that isn't ready.
func (s *start) nodeAway() (Explanation, bool) {
	if s.node == nil {
		return Explanation{}, false
	}
	for _, c := range s.node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			return Explanation{
				Text:   fmt.Sprintf("Node %s isn't ready, and neither starts nor ends pods until it is: %s", s.node.Name, sentence(cmp.Or(c.Message, c.Reason))),
				Change: "Look at the node and its kubelet. If the node is gone for good, " + s.another() + ".",
			}, true
		}
	}
	return Explanation{}, false
}

// pluginAway answers for a node whose plugin doesn't prepare claims.
func (s *start) pluginAway() (Explanation, bool) {
	node := s.pod.Spec.NodeName
	if len(s.devices(node)) == 0 || s.inventoryUnread {
		return Explanation{}, false
	}
	if s.inventory == nil {
		return Explanation{
			Waits: true, Text: fmt.Sprintf("Node %s has no GPUInventory: no plugin of Tessera runs there, and its claims aren't prepared.", node),
			Change: "Look at the node affinity and the tolerations of the DaemonSet of Tessera's plugin, and at the taints of the node: kubectl gpu doctor.",
		}, true
	}
	ready := meta.FindStatusCondition(s.inventory.Status.Conditions, v1alpha1.ConditionReady)
	switch {
	case ready == nil:
		return Explanation{
			Waits: true, Text: fmt.Sprintf("The plugin of node %s has just started, and prepares no claims yet.", node),
			Change: "If it stays so for a minute, look at the log of the plugin's pod on the node.",
		}, true
	case ready.Status != metav1.ConditionTrue:
		change := "What that means, and what to do: " + cluster.Documents + "troubleshoot.md#a-nodes-gpuinventory-is-not-ready"
		if ready.Reason == v1alpha1.ReasonPluginSilent {
			change = "Look at the plugin's pod on the node and at the kubelet. The kubelet prepares the claims when the plugin is back."
		}
		return Explanation{Waits: true, Text: fmt.Sprintf("Node %s prepares no claims now: %s: %s", node, ready.Reason, sentence(ready.Message)), Change: change}, true
	}
	return Explanation{}, false
}

// prepareFailed is the reason of events about claims that aren't prepared.
const prepareFailed = "FailedPrepareDynamicResources"

// ofClaim finds the claim and the plugin's message in the kubelet's, which differs between its
// versions.
var ofClaim = regexp.MustCompile(`NodePrepareResources failed for (?:ResourceClaim|claim) (\S+): ((?s:.*))`)

// kubeletsWord answers by the kubelet's last warning.
func (s *start) kubeletsWord() (Explanation, bool) {
	i := slices.IndexFunc(s.events, s.isKubelets)
	if i < 0 {
		return Explanation{}, false
	}
	e := &s.events[i]
	tried := "tried " + s.age(e) + " ago"
	if e.Count > 1 {
		tried += fmt.Sprintf(", %d times", e.Count)
	}
	if e.Reason != prepareFailed {
		return Explanation{
			Text:   fmt.Sprintf("The kubelet of %s can't start it (%s), %s: %s", s.pod.Spec.NodeName, e.Reason, tried, sentence(e.Message)),
			Change: s.remedy(e.Message, "Its devices aren't the reason. All events: "+s.describe()),
		}, true
	}
	what, message := "its claims", e.Message
	if m := ofClaim.FindStringSubmatch(e.Message); m != nil {
		what, message = "claim "+m[1], m[2]
	} else if _, rest, ok := strings.Cut(e.Message, "ynamic resources: "); ok {
		message = strings.TrimPrefix(rest, "prepare dynamic resources: ")
	}
	return Explanation{
		Waits: true, Text: fmt.Sprintf("Node %s can't prepare %s, %s: %s", s.pod.Spec.NodeName, what, tried, sentence(message)),
		Change: s.remedy(message, "The kubelet tries again after 60 to 90 seconds. What messages mean: "+cluster.Documents+"troubleshoot.md#a-pod-with-a-claim-does-not-start"),
	}, true
}

// isKubelets reports whether an event is a warning about the pod's start on its node.
func (s *start) isKubelets(e corev1.Event) bool {
	by := cmp.Or(e.ReportingController, e.Source.Component)
	return e.InvolvedObject.UID == s.pod.UID && e.Type == corev1.EventTypeWarning && (by == "kubelet" || by == "attachdetach-controller")
}

// container answers for a pod whose claims are prepared: by a container that isn't started.
func (s *start) container() Explanation {
	on := s.pod.Spec.NodeName
	for _, c := range slices.Concat(s.pod.Status.InitContainerStatuses, s.pod.Status.ContainerStatuses) {
		w := c.State.Waiting
		if w == nil || w.Reason == "ContainerCreating" || w.Reason == "PodInitializing" {
			continue
		}
		message := w.Message
		if t := c.LastTerminationState.Terminated; t != nil && t.Message != "" && t.Reason == "StartError" {
			message = t.Message // the other says only that it is tried again
		}
		return Explanation{
			Text:   fmt.Sprintf("Its claims are prepared on %s, and its container %s isn't started (%s): %s", on, c.Name, w.Reason, sentence(message)),
			Change: s.remedy(message, "Its devices aren't the reason, as far as is known. All events: "+s.describe()),
		}
	}
	return Explanation{
		Text:   fmt.Sprintf("It doesn't wait for devices: its claims are prepared on %s, and its containers are being created.", on),
		Change: "An image may be pulled; its events say more: " + s.describe(),
	}
}

// ending answers for a pod that is being deleted.
func (s *start) ending() Explanation {
	out := Explanation{Text: "It is being deleted."}
	own := func(e corev1.Event) bool { return e.Reason == inUse && s.now.Sub(when(&e)) < stale }
	if i := slices.IndexFunc(s.events, own); i >= 0 {
		e := &s.events[i]
		out.Text = fmt.Sprintf("It is being deleted, and its node can't release its claim %s, tried %s ago: %s", e.InvolvedObject.Name, s.age(e), sentence(e.Message))
		out.Change = s.remedy(e.Reason, "")
	}
	return out
}

// unknown answers where nothing is known.
func (s *start) unknown() Explanation {
	said := "the kubelet has said nothing of it"
	if s.eventsUnread {
		said = "what the kubelet says of it isn't known"
	}
	return Explanation{
		Text: fmt.Sprintf("It is on %s, which hasn't started it yet, and %s.", s.pod.Spec.NodeName, said),
		Change: "A claim whose device another one is releasing waits for up to 45 seconds. If nothing happens for two minutes, look at the log of the plugin's pod on the node, " +
			"and at the kubelet's.",
	}
}

// remedy says how what the message is about ends, and what to do.
func (s *start) remedy(message, otherwise string) string {
	o, ok := obstacle.Find(message)
	if !ok {
		return otherwise
	}
	do := strings.ReplaceAll(o.Do, "`", "")
	if o.Class == obstacle.Device && o.Stage == obstacle.Prepare {
		do += " Another device may do: " + s.another() + "."
	}
	return do
}

// another says how a pod with other devices comes in the place of this one: a clause.
func (s *start) another() string {
	for i := range s.claims {
		if n := len(s.claims[i].Status.ReservedFor); n > 1 {
			return fmt.Sprintf("delete all %d pods that use claim %s, which is allocated again when they have ended", n, s.claims[i].Name)
		}
	}
	if owner := metav1.GetControllerOf(s.pod); owner != nil {
		return fmt.Sprintf("delete the pod, and %s %s makes another", owner.Kind, owner.Name)
	}
	return "delete the pod and create it again, because nothing else does"
}

func (s *start) describe() string {
	return fmt.Sprintf("kubectl describe pod %s -n %s", s.pod.Name, s.pod.Namespace)
}
