package fit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
)

// Cause is the kind of a Reason.
type Cause string

// The causes, in the order in which they are looked for.
const (
	// NoNode: no node takes the pod, whatever its claims.
	NoNode Cause = "NoNode"
	// NoDevices: nodes that take the pod publish no devices.
	NoDevices Cause = "NoDevices"
	// Refused: the scheduler refuses the claims on any node: a class that doesn't exist,
	// a selector that fails.
	Refused Cause = "Refused"
	// TooLong: there are so many combinations of devices that the scheduler gives up.
	TooLong Cause = "TooLong"
	// Updating: slices of a pool are missing while they are being written.
	Updating Cause = "Updating"
	// Own: allocated claims of the pod itself have what its other claims need.
	Own Cause = "Own"
	// NoMatch: no device matches a request.
	NoMatch Cause = "NoMatch"
	// TooMany: a request asks for more devices than a node has.
	TooMany Cause = "TooMany"
	// Constraint: devices of a node match, and not together.
	Constraint Cause = "Constraint"
	// Tainted: taints keep claims off the devices that match.
	Tainted Cause = "Tainted"
	// InUse: other claims have what is needed.
	InUse Cause = "InUse"
)

// Reason is why claims fit nowhere.
type Reason struct {
	Cause Cause `json:"cause"`
	// Text is one sentence.
	Text string `json:"text"`
	// Change is a sentence about the change that would make them fit.
	Change string `json:"change"`
	// Node and Release are set if other claims have what is needed: after the end of
	// all of Release, the claims fit on Node. There may be other such nodes and claims.
	Node    string  `json:"node,omitempty"`
	Release []Claim `json:"release,omitempty"`
}

// why finds the reason why the claims of the trial fit on none of the nodes.
func (j *Judge) why(ctx context.Context, nodes []*corev1.Node, t trial) (*Reason, error) {
	if len(nodes) == 0 {
		return &Reason{Cause: NoNode, Text: "There is no node that it could run on.", Change: "Add a node."}, nil
	}
	nodes = slices.DeleteFunc(slices.Clone(nodes), func(n *corev1.Node) bool { return len(j.slicesFor(n)) == 0 })
	if len(nodes) == 0 {
		return &Reason{
			Cause: NoDevices, Text: "No node that it can run on publishes devices.",
			Change: "Look at the nodes' GPUInventories: kubectl gpu get.",
		}, nil
	}
	t.untainted = true
	possible, err := j.where(ctx, nodes, t)
	if len(possible) == 0 || err != nil {
		return j.whyNever(ctx, nodes, t, err)
	}
	t.untainted = false
	healthy, err := j.where(ctx, possible, t)
	if err != nil {
		return nil, err
	}
	if len(healthy) == 0 {
		return j.whyTainted(ctx, possible, t.claims), nil
	}
	return j.whyInUse(ctx, healthy, t)
}

// where returns the nodes on which the trial succeeds.
func (j *Judge) where(ctx context.Context, nodes []*corev1.Node, t trial) ([]*corev1.Node, error) {
	return j.whereOf(ctx, nodes, func(*corev1.Node) trial { return t })
}

// whereOf is where with a trial for each node.
func (j *Judge) whereOf(ctx context.Context, nodes []*corev1.Node, of func(*corev1.Node) trial) ([]*corev1.Node, error) {
	fits := make([]bool, len(nodes))
	err := eachNode(ctx, nodes, func(ctx context.Context, i int) error {
		t := of(nodes[i])
		t.node = nodes[i]
		got, err := j.ask(ctx, t)
		fits[i] = got != nil
		return err
	})
	var out []*corev1.Node
	for i, n := range nodes {
		if fits[i] {
			out = append(out, n)
		}
	}
	return out, err
}

// whyNever explains why the claims wouldn't fit either if nobody else had devices and
// none were tainted. The error is the allocator's, if it refuses them.
func (j *Judge) whyNever(ctx context.Context, nodes []*corev1.Node, t trial, err error) (*Reason, error) {
	if err != nil {
		return nil, err
	}
	if r := j.updating(nodes); r != nil {
		return r, nil
	}
	if r, err := j.whyOwn(ctx, nodes, t); r != nil || err != nil {
		return r, err
	}
	if r, err := j.whyAlone(ctx, nodes, t.claims); r != nil || err != nil {
		return r, err
	}
	return j.whyTogether(ctx, nodes, t.claims)
}

// whyAlone explains why a request can't be met even alone; nil if all can.
func (j *Judge) whyAlone(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (*Reason, error) {
	for _, c := range claims {
		for i := range c.Spec.Devices.Requests {
			if r, err := j.whyRequest(ctx, nodes, c, i); r != nil || err != nil {
				return r, err
			}
		}
	}
	return nil, nil //nolint:nilnil // each can be met
}

// whyRefused explains an error of the allocator. Where the scheduler gives up, a request
// that can't be met even alone is a better reason, if it is found within the same time.
func (j *Judge) whyRefused(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim, err error) (*Reason, error) {
	switch {
	case errors.Is(err, errTooLong):
		soon, cancel := context.WithTimeout(ctx, j.within)
		defer cancel()
		if r, failed := j.whyAlone(soon, nodes, claims); failed == nil && r != nil {
			return r, nil
		}
		return tooLong(err), ctx.Err()
	case errors.Is(err, errUnjudgeable):
		return j.refused(ctx, nodes, claims, err), nil
	}
	return nil, err
}

func tooLong(err error) *Reason {
	text := strings.TrimPrefix(err.Error(), errUnjudgeable.Error()+": ")
	return &Reason{
		Cause:  TooLong,
		Text:   fmt.Sprintf("The scheduler finds no devices for it within %s, and gives up: %s.", filterTimeout, text),
		Change: "Ask for fewer devices in one pod, or for the largest ones first, or name them by narrower selectors; the scheduler tries again, but finds them only if there are fewer combinations.",
	}
}

// refused explains an error of the allocator that is of the claims.
func (j *Judge) refused(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim, err error) *Reason {
	text := strings.TrimPrefix(err.Error(), errUnjudgeable.Error()+": ")
	text, _, _ = strings.Cut(text, ". consider using CEL") // Change says how
	r := &Reason{Cause: Refused, Text: "The scheduler refuses it on every node: " + text + ".", Change: "Correct the claim."}
	switch {
	case strings.Contains(text, "could not retrieve device class"):
		r.Change = "Correct the name of the DeviceClass, or create it: kubectl get deviceclasses lists them."
	case strings.Contains(text, noSuchKey):
		_, key, _ := strings.Cut(text, noSuchKey)
		if r.Change = j.unknownKey(ctx, nodes, claims, key); r.Change != "" {
			break
		}
		r.Change = "Write selectors that are false where an attribute is absent: .?NAME.orValue(\"\") in place of .NAME."
	}
	return r
}

// updating returns a Reason if a pool of the nodes isn't complete, and nil otherwise.
func (j *Judge) updating(nodes []*corev1.Node) *Reason {
	for _, n := range nodes {
		newest, count := make(map[pool]int64), make(map[pool]int64)
		for _, s := range j.slicesFor(n) {
			p := pool{s.Spec.Driver, s.Spec.Pool.Name}
			if s.Spec.Pool.Generation > newest[p] {
				newest[p], count[p] = s.Spec.Pool.Generation, -s.Spec.Pool.ResourceSliceCount
			} else if _, ok := count[p]; !ok {
				count[p] = -s.Spec.Pool.ResourceSliceCount
			}
			if s.Spec.Pool.Generation == newest[p] {
				count[p]++
			}
		}
		for p, missing := range count {
			if missing != 0 {
				return &Reason{
					Cause: Updating, Text: fmt.Sprintf("The ResourceSlices of pool %s are being written, and nothing of an incomplete pool is allocated.", p.name),
					Change: "Wait some seconds; if it stays so, look at the log of Tessera's controller.",
				}
			}
		}
	}
	return nil
}

// whyRequest explains why one request alone can't be met, by none of its alternatives;
// nil if it can.
func (j *Judge) whyRequest(ctx context.Context, nodes []*corev1.Node, c *resourceapi.ResourceClaim, i int) (*Reason, error) {
	out := &Reason{}
	var texts, changes []string
	for _, one := range alternatives(c.Spec.Devices.Requests[i].DeepCopy()) {
		alone := c.DeepCopy()
		alone.Spec.Devices = resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{one}}
		r, err := j.whyAlternative(ctx, nodes, alone)
		if r == nil || err != nil {
			return nil, err
		}
		if out.Cause != "" && out.Cause != r.Cause {
			r.Cause = NoMatch
		}
		out.Cause, texts = r.Cause, append(texts, r.Text)
		if !slices.Contains(changes, r.Change) {
			changes = append(changes, r.Change)
		}
	}
	out.Text, out.Change = strings.Join(texts, " "), strings.Join(changes, " ")
	return out, nil
}

// alternatives returns the request for each of its alternatives, or as it is if it has
// none.
func alternatives(r *resourceapi.DeviceRequest) []resourceapi.DeviceRequest {
	if r.Exactly != nil {
		return []resourceapi.DeviceRequest{*r}
	}
	var out []resourceapi.DeviceRequest
	for _, s := range r.FirstAvailable {
		out = append(out, resourceapi.DeviceRequest{Name: r.Name, FirstAvailable: []resourceapi.DeviceSubRequest{s}})
	}
	return out
}

// whyAlternative explains why a claim with one request without other alternatives can't
// be met; nil if it can. It changes the claim.
func (j *Judge) whyAlternative(ctx context.Context, nodes []*corev1.Node, c *resourceapi.ResourceClaim) (*Reason, error) {
	t := trial{claims: []*resourceapi.ResourceClaim{c}, untainted: true}
	met, err := j.where(ctx, nodes, t)
	if len(met) > 0 || err != nil {
		return nil, err
	}
	request := &c.Spec.Devices.Requests[0]
	wish, count := wishesOf(request)[0], countOf(request)
	want := *count
	if want > 1 {
		*count = 1
		if met, err = j.where(ctx, nodes, t); err != nil {
			return nil, err
		}
	}
	if len(met) == 0 {
		return j.noMatch(ctx, j.offers(nodes), wish), nil
	}
	most, where := int64(1), met[0].Name
	for n := int64(2); n < want; n++ {
		*count = n
		more, err := j.where(ctx, met, t)
		if err != nil {
			return nil, err
		}
		if len(more) == 0 {
			break
		}
		most, where, met = n, more[0].Name, more
	}
	return &Reason{
		Cause: TooMany,
		Text: fmt.Sprintf("Request %s asks for %d devices of one node, and no node has more than %d that match (%s).",
			wish.name, want, most, where),
		Change: fmt.Sprintf("Ask for at most %d, or divide the work among several pods.", most),
	}, nil
}

// countOf returns the number of devices that a request without other alternatives asks for.
func countOf(r *resourceapi.DeviceRequest) *int64 {
	if r.Exactly != nil {
		return &r.Exactly.Count
	}
	return &r.FirstAvailable[0].Count
}

// whyTogether explains why requests that can each be met can't be met together.
func (j *Judge) whyTogether(ctx context.Context, nodes []*corev1.Node, claims []*resourceapi.ResourceClaim) (*Reason, error) {
	free, constraints := withoutConstraints(claims)
	met, err := j.where(ctx, nodes, trial{claims: free, untainted: true})
	if err != nil {
		return nil, err
	}
	if len(met) > 0 {
		return &Reason{
			Cause:  Constraint,
			Text:   fmt.Sprintf("No node has enough devices that match and have %s, as the claim's constraints want.", constraints),
			Change: "Leave out the constraint, or ask for fewer devices.",
		}, nil
	}
	return &Reason{
		Cause: TooMany, Text: "Each request can be met alone, and no node has devices for all of them at once.",
		Change: "Ask for fewer or smaller devices, or divide the work among several pods.",
	}, nil
}

// withoutConstraints returns the claims without their constraints, and a text that says
// what devices must have by these; empty if the claims have none.
func withoutConstraints(claims []*resourceapi.ResourceClaim) (free []*resourceapi.ResourceClaim, constraints string) {
	var all []string
	for _, c := range claims {
		without := c.DeepCopy()
		for _, x := range without.Spec.Devices.Constraints {
			if x.MatchAttribute != nil {
				all = append(all, "the same "+string(*x.MatchAttribute))
			}
			if x.DistinctAttribute != nil {
				all = append(all, "different values of "+string(*x.DistinctAttribute))
			}
		}
		without.Spec.Devices.Constraints = nil
		free = append(free, without)
	}
	return free, list(all)
}

// list joins words: "a, b and c".
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}
