package fit

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// whyInUse explains which claims have what is needed, on a node where the fewest have
// to end.
func (j *Judge) whyInUse(ctx context.Context, nodes []*corev1.Node, t trial) (*Reason, error) {
	constraint, err := j.unmatched(ctx, nodes, t)
	if err != nil {
		return nil, err
	}
	node, leave, err := j.release(ctx, nodes, t)
	if err != nil {
		return nil, err
	}
	holders := j.holders(node)
	t.node, t.holders = node, without(holders, leave)
	got, err := j.ask(ctx, t)
	if err != nil {
		return nil, err
	}
	r := &Reason{Cause: InUse, Node: node.Name}
	var names []string
	for _, c := range leave {
		d := describe(c)
		r.Release, names = append(r.Release, d), append(names, d.String())
	}
	on := j.onNode(node, holders)
	r.Text = constraint + fmt.Sprintf("Other claims have what it needs: %s.", on.blocked(got))
	r.Change = fmt.Sprintf("It fits on %s after the end of claim %s.", node.Name, list(names))
	if len(names) > 1 {
		r.Change = fmt.Sprintf("It fits on %s after the end of claims %s.", node.Name, list(names))
	}
	return r, nil
}

// unmatched returns a sentence if there would be enough free devices but for the claims'
// constraints, and otherwise "".
func (j *Judge) unmatched(ctx context.Context, nodes []*corev1.Node, t trial) (string, error) {
	free, constraints := withoutConstraints(t.claims)
	if constraints == "" {
		return "", nil
	}
	fits, err := j.whereOf(ctx, nodes, func(n *corev1.Node) trial {
		return trial{claims: free, holders: j.holders(n), untainted: t.untainted}
	})
	if len(fits) == 0 || err != nil {
		return "", err
	}
	return fmt.Sprintf("Free devices match, but none of them together have %s, as the claim's constraints want. ", constraints), nil
}

// whyOwn explains that the pod's own claims, which stay, have what its other claims need;
// nil if they don't fit without these either.
func (j *Judge) whyOwn(ctx context.Context, nodes []*corev1.Node, t trial) (*Reason, error) {
	own := t.holders
	if len(own) == 0 {
		return nil, nil //nolint:nilnil // it has none
	}
	t.holders, t.untainted = nil, true
	possible, err := j.where(ctx, nodes, t)
	if len(possible) == 0 || err != nil {
		return nil, err
	}
	t.node = possible[0]
	got, err := j.ask(ctx, t)
	if err != nil {
		return nil, err
	}
	return &Reason{
		Cause: Own,
		Text:  fmt.Sprintf("The pod's own claims have what its other claims need: %s.", j.onNode(t.node, own).blocked(got)),
		Change: "Allocated claims keep their devices: ask for less, or use another claim, for which the scheduler chooses devices " +
			"together with the others.",
	}, nil
}

func (j *Judge) onNode(node *corev1.Node, holders []*resourceapi.ResourceClaim) onNode {
	return onNode{node: node.Name, holders: holders, slices: j.slicesFor(node)}
}

// onNode knows the devices of a node, and the claims that have some.
type onNode struct {
	node    string
	holders []*resourceapi.ResourceClaim
	slices  []*resourceapi.ResourceSlice
}

// blocked explains why one of the devices, the first that isn't free, can't be allocated.
func (n onNode) blocked(wanted []resourceapi.AllocationResult) string {
	for _, w := range wanted {
		for _, r := range w.Devices.Results {
			if text := n.held(r); text != "" {
				return text
			}
			if text := n.counter(r); text != "" {
				return text
			}
			if text := n.capacity(r); text != "" {
				return text
			}
		}
	}
	return fmt.Sprintf("devices that match are free on %s, but not together", n.node)
}

// held says which claim has a device, if one has it alone; "" otherwise.
func (n onNode) held(r resourceapi.DeviceRequestAllocationResult) string {
	for _, c := range n.holders {
		for _, has := range results(c) {
			if has.ShareID == nil && same(has, r) {
				return fmt.Sprintf("%s on %s belongs to claim %s", r.Device, n.node, describe(c))
			}
		}
	}
	return ""
}

func same(a, b resourceapi.DeviceRequestAllocationResult) bool {
	return a.Driver == b.Driver && a.Pool == b.Pool && a.Device == b.Device
}

// device finds a device in the slices.
func (n onNode) device(driver, pool, name string) *resourceapi.Device {
	for _, s := range n.slices {
		if s.Spec.Driver != driver || s.Spec.Pool.Name != pool {
			continue
		}
		for i := range s.Spec.Devices {
			if s.Spec.Devices[i].Name == name {
				return &s.Spec.Devices[i]
			}
		}
	}
	return nil
}

// charged reports whether the device is allocated already: its counters are consumed
// once, however often it is allocated.
func (n onNode) charged(r resourceapi.DeviceRequestAllocationResult) bool {
	return slices.ContainsFunc(n.holders, func(c *resourceapi.ResourceClaim) bool {
		return slices.ContainsFunc(results(c), func(has resourceapi.DeviceRequestAllocationResult) bool { return same(has, r) })
	})
}

// counter says which counter of a device is used up, and by which claims. If several are, it
// chooses the one that the fewest claims use, because that names the obstacle most precisely.
func (n onNode) counter(r resourceapi.DeviceRequestAllocationResult) string {
	d := n.device(r.Driver, r.Pool, r.Device)
	if d == nil || n.charged(r) {
		return ""
	}
	text, fewest := "", len(n.holders)+1
	for _, from := range d.ConsumesCounters {
		for _, name := range sortedKeys(from.Counters) {
			need := from.Counters[name].Value
			all := n.limit(r, from.CounterSet, name)
			left, users := n.left(r, from.CounterSet, name, all)
			if left >= need.Value() || len(users) >= fewest {
				continue
			}
			amount := func(v int64) string { return resource.NewQuantity(v, need.Format).String() }
			fewest, text = len(users), fmt.Sprintf("%s on %s needs %s of its counter %s; %s of %s are free, the rest is used by claim%s %s",
				r.Device, n.node, amount(need.Value()), name, amount(left), amount(all), plural(len(users)), list(users))
		}
	}
	return text
}

// left returns how much of a counter claims leave, and which claims use it.
func (n onNode) left(r resourceapi.DeviceRequestAllocationResult, set, counter string, all int64) (left int64, users []string) {
	left = all
	counted := make(map[string]bool)
	for _, c := range n.holders {
		uses := false
		for _, has := range results(c) {
			takes := n.takes(has, r, set, counter)
			if uses = uses || takes > 0; takes > 0 && !counted[has.Device] {
				counted[has.Device] = true
				left -= takes
			}
		}
		if uses {
			users = append(users, describe(c).String())
		}
	}
	return left, users
}

func plural(n int) string {
	if n == 1 {
		return ""
	}
	return "s"
}

func sortedKeys(m map[string]resourceapi.Counter) []string {
	out := make([]string, 0, len(m))
	for name := range m {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// takes returns how much of a counter the device of a claim consumes.
func (n onNode) takes(has, of resourceapi.DeviceRequestAllocationResult, set, counter string) int64 {
	if has.Driver != of.Driver || has.Pool != of.Pool {
		return 0
	}
	d := n.device(has.Driver, has.Pool, has.Device)
	if d == nil {
		return 0
	}
	for _, from := range d.ConsumesCounters {
		if c, ok := from.Counters[counter]; ok && from.CounterSet == set {
			return c.Value.Value()
		}
	}
	return 0
}

// limit returns the total of a counter.
func (n onNode) limit(r resourceapi.DeviceRequestAllocationResult, set, counter string) int64 {
	for _, s := range n.slices {
		if s.Spec.Driver != r.Driver || s.Spec.Pool.Name != r.Pool {
			continue
		}
		for _, x := range s.Spec.SharedCounters {
			if c, ok := x.Counters[counter]; ok && x.Name == set {
				return c.Value.Value()
			}
		}
	}
	return 0
}

// capacity says which capacity of a device that is allocated several times is used up, and
// by which claims.
func (n onNode) capacity(r resourceapi.DeviceRequestAllocationResult) string {
	d := n.device(r.Driver, r.Pool, r.Device)
	if d == nil {
		return ""
	}
	names := make([]string, 0, len(r.ConsumedCapacity))
	for name := range r.ConsumedCapacity {
		names = append(names, string(name))
	}
	slices.Sort(names)
	for _, name := range names {
		name := resourceapi.QualifiedName(name)
		need, all := r.ConsumedCapacity[name], d.Capacity[name].Value
		left := all.DeepCopy()
		var users []string
		for _, c := range n.holders {
			uses := false
			for _, has := range results(c) {
				if q, ok := has.ConsumedCapacity[name]; ok && same(has, r) {
					left.Sub(q)
					uses = true
				}
			}
			if uses {
				users = append(users, describe(c).String())
			}
		}
		if left.Cmp(need) < 0 {
			return fmt.Sprintf("it needs %s of capacity %s of %s on %s; %s of %s is free, the rest is used by claim%s %s",
				need.String(), name, r.Device, n.node, left.String(), all.String(), plural(len(users)), list(users))
		}
	}
	return ""
}
