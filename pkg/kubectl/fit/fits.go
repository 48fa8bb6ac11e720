package fit

import (
	"context"
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Answer says where claims fit.
type Answer struct {
	// Nodes on which they fit now, by name.
	Nodes []Room `json:"nodes"`
	// Count is how often they fit on all nodes.
	Count int `json:"count"`
	// More: counting stopped at a limit.
	More bool `json:"more,omitempty"`
	// Reason is why they fit nowhere; absent if they do.
	Reason *Reason `json:"reason,omitempty"`
}

// Room is a node on which claims fit.
type Room struct {
	Node string `json:"node"`
	// Count is how often the scheduler would find room for them, one pod with all of
	// them after the other.
	Count int `json:"count"`
	// Devices that the first of them would get.
	Devices []string `json:"devices"`
}

// Fits finds the nodes on which all of a pod's waiting claims together fit, and how often
// they do, up to limit times a node, or the reason why they fit on none. The pod's allocated
// claims keep their devices.
func (j *Judge) Fits(ctx context.Context, nodes []*corev1.Node, claims PodClaims, limit int) (Answer, error) {
	t := trial{claims: claims.Waiting, holders: claims.Allocated}
	rooms := make([]Room, len(nodes))
	err := eachNode(ctx, nodes, func(ctx context.Context, i int) (err error) {
		rooms[i], err = j.room(ctx, nodes[i], t.claims, limit)
		return err
	})
	out := Answer{Nodes: []Room{}}
	if err != nil {
		out.Reason, err = j.whyRefused(ctx, nodes, t.claims, err)
		return out, err
	}
	for _, r := range rooms {
		if r.Count > 0 {
			out.Nodes, out.Count, out.More = append(out.Nodes, r), out.Count+r.Count, out.More || r.Count == limit
		}
	}
	if out.Count == 0 {
		if out.Reason, err = j.why(ctx, nodes, t); err != nil {
			out.Reason, err = j.whyRefused(ctx, nodes, t.claims, err)
		}
	}
	return out, err
}

// eachNode calls f for some nodes at a time.
func eachNode(ctx context.Context, nodes []*corev1.Node, f func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range nodes {
		group.Go(func() error { return f(ctx, i) })
	}
	return group.Wait()
}

// room counts how often the claims fit on a node. An error of the allocator on one node
// ends the scheduling of a pod, so that it counts even if other nodes have room.
func (j *Judge) room(ctx context.Context, node *corev1.Node, claims []*resourceapi.ResourceClaim, limit int) (Room, error) {
	out := Room{Node: node.Name}
	if len(j.slicesFor(node)) == 0 && len(allocatedOn(node, claims)) > 0 {
		return out, nil
	}
	holders := j.holders(node)
	for out.Count < limit {
		got, err := j.ask(ctx, trial{node: node, claims: claims, holders: holders})
		if err != nil && out.Count > 0 {
			return out, ctx.Err() // the next one would be refused
		}
		if err != nil || got == nil {
			return out, err
		}
		for i := range got {
			if out.Count == 0 {
				for _, r := range got[i].Devices.Results {
					out.Devices = append(out.Devices, r.Device)
				}
			}
			holders = append(slices.Clip(holders), &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &got[i]}})
		}
		if !keepsAny(got) {
			out.Count = limit // as often as one likes: it only watches, or needs no device of a driver
			return out, nil
		}
		out.Count++
	}
	return out, nil
}

func keepsAny(got []resourceapi.AllocationResult) bool {
	for i := range got {
		if len(results(&resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &got[i]}})) > 0 {
			return true
		}
	}
	return false
}

// Claim names a claim that has devices, and those for whom it is reserved.
type Claim struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	Pods      []string  `json:"pods,omitempty"`
	PodGroups []string  `json:"podGroups,omitempty"`
	Devices   []string  `json:"devices"`
}

// String is how a sentence names the claim.
func (c Claim) String() string {
	var users []string
	if len(c.Pods) > 0 {
		users = append(users, "pod"+plural(len(c.Pods))+" "+list(c.Pods))
	}
	if len(c.PodGroups) > 0 {
		users = append(users, "PodGroup"+plural(len(c.PodGroups))+" "+list(c.PodGroups))
	}
	if len(users) == 0 {
		users = []string{"no pod uses it"}
	}
	return fmt.Sprintf("%s/%s (%s)", c.Namespace, c.Name, list(users))
}

func describe(c *resourceapi.ResourceClaim) Claim {
	out := Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
	for _, u := range Groups(nil).UsersOf(c) {
		if u.Pod != "" {
			out.Pods = append(out.Pods, u.Pod)
		} else {
			out.PodGroups = append(out.PodGroups, u.Group)
		}
	}
	for _, r := range results(c) {
		out.Devices = append(out.Devices, r.Device)
	}
	return out
}

// maxReleaseNodes is on how many nodes a smallest release is looked for.
const maxReleaseNodes = 16

// release finds claims on one of the nodes after whose end those of the trial fit there:
// none of them can be left out, and on no other node that was looked at are they fewer.
func (j *Judge) release(ctx context.Context, nodes []*corev1.Node, t trial) (*corev1.Node, []*resourceapi.ResourceClaim, error) {
	var node *corev1.Node
	var fewest []*resourceapi.ResourceClaim
	for _, n := range nodes[:min(len(nodes), maxReleaseNodes)] {
		found, err := j.releaseOn(ctx, n, t)
		if err != nil {
			return nil, nil, err
		}
		if node == nil || len(found) < len(fewest) {
			node, fewest = n, found
		}
		if len(fewest) == 1 {
			break
		}
	}
	return node, fewest, nil
}

// releaseOn finds them on one node, on which the claims fit once all others than the pod's
// own are gone.
func (j *Judge) releaseOn(ctx context.Context, node *corev1.Node, t trial) ([]*resourceapi.ResourceClaim, error) {
	t.node = node
	own := t.holders
	others := without(j.holders(node), own)
	fits := func(stay []*resourceapi.ResourceClaim) (bool, error) {
		t.holders = slices.Concat(own, stay)
		got, err := j.ask(ctx, t)
		return got != nil, err
	}
	for i, h := range others {
		ok, err := fits(slices.Delete(slices.Clone(others), i, i+1))
		if ok || err != nil {
			return []*resourceapi.ResourceClaim{h}, err
		}
	}
	var stay, leave []*resourceapi.ResourceClaim
	for _, h := range others {
		ok, err := fits(append(slices.Clip(stay), h))
		if err != nil {
			return nil, err
		}
		if ok {
			stay = append(stay, h)
		} else {
			leave = append(leave, h)
		}
	}
	return leave, nil
}

// without returns the claims that aren't among the others.
func without(claims, others []*resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
	other := func(c *resourceapi.ResourceClaim) bool { return slices.Contains(others, c) }
	return slices.DeleteFunc(slices.Clone(claims), other)
}
