package why

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
)

// condition is one of a GPU, as a sentence.
type condition struct{ kind, text string }

func texts(all []condition) []string {
	var out []string
	for _, c := range all {
		out = append(out, c.text)
	}
	return out
}

// conditions are those of the pod's GPUs that may keep its claims from being prepared: all
// that aren't for information only, nor of other silicon of these GPUs.
func (s *start) conditions() []condition {
	if s.inventory == nil {
		return nil
	}
	facts := inventory.Node(s.inventory)
	names := gpu.NameAll(facts.GPUs)
	var out []condition
	for _, d := range s.devices(s.inventory.Name) {
		uuid, _ := names.Parent(d.name)
		i := slices.IndexFunc(facts.GPUs, func(g gpu.GPU) bool { return g.UUID == uuid })
		if i < 0 {
			continue
		}
		for _, c := range facts.GPUs[i].Conditions {
			if c.Type.Effect() == gpu.Informational || c.Type == gpu.PrepareFailed && !c.BlocksDevice(d.name, names) {
				continue
			}
			text := fmt.Sprintf("GPU %d of node %s has the condition %s: %s", facts.GPUs[i].Index, s.inventory.Name, c.Type, sentence(c.Message))
			if len(c.Refused) > 0 && s.now.Before(c.RetryAt) {
				text += fmt.Sprintf(" %s is offered again at %s, so that one claim tries it.", c.Refused[0], c.RetryAt.UTC().Format(time.RFC3339))
			}
			if !slices.Contains(texts(out), text) {
				out = append(out, condition{string(c.Type), text})
			}
		}
	}
	return out
}

// claimsEvents are the newest warnings about the pod's claims, of each reason one, and those
// about claims that still have its devices.
func (s *start) claimsEvents() []string {
	var out []string
	told := make(map[string]bool)
	for _, e := range slices.Concat(s.events, s.left) {
		key := string(e.InvolvedObject.UID) + e.Reason
		if e.InvolvedObject.Kind != "ResourceClaim" || e.Type != corev1.EventTypeWarning || told[key] || s.pod.DeletionTimestamp != nil && e.Reason == inUse {
			continue
		}
		told[key] = true
		out = append(out, fmt.Sprintf("Claim %s/%s has the event %s, %s ago: %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, s.age(&e), sentence(e.Message)))
	}
	return out
}

// nodePlugin is the component of events that the node's plugin writes.
const nodePlugin = "tessera-kubelet-plugin"

// pluginsEvents are the newest events of the node's plugin about the pod, of each reason one, but
// for those that the conditions say.
func (s *start) pluginsEvents(conditions []condition) []string {
	var out []string
	told := make(map[string]bool)
	for _, c := range conditions {
		told[c.kind] = true
	}
	for _, e := range s.events {
		if e.InvolvedObject.UID != s.pod.UID || e.Source.Component != nodePlugin || told[e.Reason] {
			continue
		}
		told[e.Reason] = true
		out = append(out, fmt.Sprintf("It has the event %s, %s ago: %s", e.Reason, s.age(&e), sentence(e.Message)))
	}
	return out
}

// age is how long ago an event was, in minutes if it is more than one.
func (s *start) age(e *corev1.Event) string {
	d := s.now.Sub(when(e))
	if d > time.Minute {
		d = d.Truncate(time.Minute)
	}
	return duration.HumanDuration(d)
}

// sentence ends a text with a full stop.
func sentence(text string) string { return strings.TrimRight(text, ". \n") + "." }
