// Package obstacle lists what keeps a pod from starting after the scheduler has bound it to a
// node: why its claims aren't prepared, why its containers don't start, and why an earlier
// claim doesn't release the devices that they need. Each obstacle has a part of the text by
// which users meet it, whose failure it is, how it ends, and what to do.
//
// It is data. kubectl gpu why explains errors by it, and tables of docs/user/troubleshoot.md are
// made of it. A test compares it with the texts of errors in the sources.
package obstacle

import (
	"cmp"
	"slices"
	"strings"
)

//go:generate go run ./gen ../../docs/user/troubleshoot.md

// Class is whose failure an obstacle is.
type Class string

const (
	// Device: this device can't be used for the claim, others could.
	Device Class = "device"
	// Node: no claim of this kind can be prepared on the node.
	Node Class = "node"
	// Claim: the claim or its pod must change, or the claim must be allocated again.
	Claim Class = "claim"
	// Moment: it ends by itself, mostly soon.
	Moment Class = "moment"
)

// Stage is what doesn't get done.
type Stage string

const (
	// Prepare: a claim isn't prepared. Users see the text in an event of the pod, of the reason
	// FailedPrepareDynamicResources.
	Prepare Stage = "prepare"
	// Start: a container isn't created, doesn't start, or its programs wait for what was set up
	// for it. Users see the text in an event or in the container's status.
	Start Stage = "start"
	// Release: an ended pod's claim isn't released. The text is in the log of the node's plugin,
	// unless it is the reason of an event; the pod stays in Terminating.
	Release Stage = "release"
)

// Obstacle is one thing that keeps a pod from starting.
type Obstacle struct {
	Stage Stage
	Class Class
	// Foreign: the texts are those of the kubelet, the container runtime or NVIDIA's programs.
	Foreign bool
	// Clear: the message itself says what to do. The page leaves it out.
	Clear bool
	// Texts are parts of messages, without what differs from one to the next: each identifies
	// the obstacle.
	Texts []string
	// Means explains the message: a clause.
	Means string
	// Do says how it ends, and what to do: sentences.
	Do string
}

// All returns the obstacles of all stages, in the order in which they are shown.
func All() []Obstacle {
	return slices.Concat(
		of(Prepare, Device, devices()), of(Prepare, Node, nodes()), of(Prepare, Claim, claims()), of(Prepare, Moment, moments()),
		of(Start, Device, daemons()), of(Start, Node, runtimes()), of(Start, Claim, pods()), of(Release, Moment, releases()),
	)
}

// of sets the stage of obstacles, and the class of those that have none.
func of(stage Stage, class Class, all []Obstacle) []Obstacle {
	for i := range all {
		all[i].Stage, all[i].Class = stage, cmp.Or(all[i].Class, class)
	}
	return all
}

// Find returns the obstacle that a message is about: of those with a text in the message, the
// one with the longest, which says most.
func Find(message string) (found Obstacle, ok bool) {
	longest := 0
	for _, o := range All() {
		for _, text := range o.Texts {
			if len(text) > longest && strings.Contains(message, text) {
				found, longest = o, len(text)
			}
		}
	}
	return found, longest > 0
}
