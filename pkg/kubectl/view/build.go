package view

import (
	"cmp"
	"maps"
	"runtime"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/rank"
)

// Objects are what the model is made of. Objects that the reader may not see, or
// that the cluster doesn't have, are missing: the model then knows less.
type Objects struct {
	Slices []resourceapi.ResourceSlice
	Claims []resourceapi.ResourceClaim
	// SomeClaims: there may be more claims, so what else fits isn't known.
	SomeClaims bool
	// Pods have the phases, and the names of their PodGroups.
	Pods        []corev1.Pod
	Inventories []v1alpha1.GPUInventory
	Policies    []v1alpha1.SharingPolicy
	// Nodes have the ranks.
	Nodes []corev1.Node
	// TaintRules add taints to devices of the slices.
	TaintRules []resourceapi.DeviceTaintRule
}

// Build makes the model. Slices and claims of other drivers are ignored.
func Build(o Objects) Cluster {
	b := builder{
		nodes: make(map[string]*node), places: make(map[placeKey]*Placement), groups: fit.GroupsOf(o.Pods), phases: phases(o.Pods), someClaims: o.SomeClaims,
	}
	for i := range o.Inventories {
		b.addInventory(&o.Inventories[i])
	}
	all := fit.WithTaintRules(o.Slices, o.TaintRules)
	for i := range all {
		b.addSlice(&all[i])
	}
	b.each((*node).readPool)
	b.addClaims(o.Claims)
	b.addPolicies(o.Policies)
	for i := range o.Nodes {
		if n := b.nodes[o.Nodes[i].Name]; n != nil {
			n.Rank = rank.Of(o.Nodes[i].Spec.Taints).String()
		}
	}
	b.each(b.finish)
	out := Cluster{Nodes: make([]Node, 0, len(b.nodes))}
	for _, n := range b.nodes {
		out.Nodes = append(out.Nodes, n.Node)
	}
	slices.SortFunc(out.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// each calls f for every node, for some nodes at the same time.
func (b *builder) each(f func(*node)) {
	all := slices.Collect(maps.Values(b.nodes))
	var group sync.WaitGroup
	for part := range slices.Chunk(all, 1+len(all)/runtime.GOMAXPROCS(0)) {
		group.Go(func() {
			for _, n := range part {
				f(n)
			}
		})
	}
	group.Wait()
}

func phases(pods []corev1.Pod) map[types.UID]string {
	out := make(map[types.UID]string, len(pods))
	for i := range pods {
		out[pods[i].UID] = string(pods[i].Status.Phase)
	}
	return out
}

type builder struct {
	nodes  map[string]*node
	places map[placeKey]*Placement
	groups fit.Groups
	phases map[types.UID]string
	// someClaims: what else fits isn't known.
	someClaims bool
}

// placeKey identifies a partition of any GPU of a model by the end of its name.
type placeKey struct{ model, part string }

// node is a Node while it is made.
type node struct {
	Node
	slices []*resourceapi.ResourceSlice
	gpus   map[gpu.DeviceName]*gpuBuilder
	// devices of the complete pool, by name.
	devices map[string]*resourceapi.Device
	names   *gpu.Names
}

// gpuBuilder is a GPU while it is made.
type gpuBuilder struct {
	GPU
	// reported: its node's plugin has said what it is.
	reported bool
	// devices in the order in which the scheduler takes them.
	devices []*resourceapi.Device
	set     *resourceapi.CounterSet
	// held are devices that claims have, and consumed what claims have of those that
	// can be allocated several times.
	held     map[string]bool
	consumed map[string]map[resourceapi.QualifiedName]int64
}

func (b *builder) node(name string) *node {
	n := b.nodes[name]
	if n == nil {
		n = &node{Node: Node{Name: name}, gpus: make(map[gpu.DeviceName]*gpuBuilder)}
		b.nodes[name] = n
	}
	return n
}

func (n *node) gpuBuilder(name gpu.DeviceName) *gpuBuilder {
	c := n.gpus[name]
	if c == nil {
		c = &gpuBuilder{GPU: GPU{Device: string(name), Index: -1, Uses: []Use{}, Fits: []Fit{}}}
		n.gpus[name] = c
	}
	return c
}

// addSlice adds a slice of a node's pool, which has the node's name.
func (b *builder) addSlice(s *resourceapi.ResourceSlice) {
	if s.Spec.Driver != gpu.DriverName || s.Spec.NodeName == nil || s.Spec.Pool.Name != *s.Spec.NodeName {
		return
	}
	n := b.node(*s.Spec.NodeName)
	switch {
	case len(n.slices) == 0 || s.Spec.Pool.Generation == n.slices[0].Spec.Pool.Generation:
		n.slices = append(n.slices, s)
	case s.Spec.Pool.Generation > n.slices[0].Spec.Pool.Generation:
		n.slices = []*resourceapi.ResourceSlice{s}
	}
}

// complete reports whether all slices of the newest generation are there.
func (n *node) complete() bool {
	return len(n.slices) > 0 && int64(len(n.slices)) == n.slices[0].Spec.Pool.ResourceSliceCount
}

// readPool reads the devices of the newest generation of the node's slices, if all of
// them are there.
func (n *node) readPool() {
	if !n.complete() {
		return
	}
	slices.SortFunc(n.slices, func(a, b *resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	count, sets := 0, make(map[string]*resourceapi.CounterSet)
	for _, s := range n.slices {
		count += len(s.Spec.Devices)
		for i := range s.Spec.SharedCounters {
			sets[s.Spec.SharedCounters[i].Name] = &s.Spec.SharedCounters[i]
		}
	}
	n.devices = make(map[string]*resourceapi.Device, count)
	for _, s := range n.slices {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			n.devices[d.Name] = d
			c := n.gpuBuilder(gpu.DeviceName(d.Name).Whole())
			c.add(d)
			for _, from := range d.ConsumesCounters {
				c.set = sets[from.CounterSet]
			}
		}
	}
}

// add adds a published device of the GPU.
func (c *gpuBuilder) add(d *resourceapi.Device) {
	c.devices = append(c.devices, d)
	for _, t := range d.Taints {
		c.addTaint(t)
	}
	if at := placeOf(d); at != nil && !c.reported {
		c.MemorySlices = max(c.MemorySlices, at.Start+at.Size)
	}
	if c.Offered {
		return
	}
	c.Offered = true
	if c.Index < 0 {
		c.Index = int(number(d, "index"))
	}
	c.Model = cmp.Or(c.Model, text(d, "productName"))
	c.UUID = cmp.Or(c.UUID, text(d, "parentUUID"), text(d, "uuid"))
	if c.MemoryBytes == 0 && gpu.DeviceName(d.Name) == gpu.DeviceName(c.Device) {
		c.MemoryBytes = capacity(d, gpu.MemoryCapacity)
	}
}

func (c *gpuBuilder) addTaint(t resourceapi.DeviceTaint) {
	same := func(u Taint) bool { return u.Key == t.Key && u.Value == t.Value && u.Effect == string(t.Effect) }
	if !slices.ContainsFunc(c.Taints, same) {
		c.Taints = append(c.Taints, Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect), Since: t.TimeAdded})
	}
}

func (b *builder) addClaims(claims []resourceapi.ResourceClaim) {
	for i := range claims {
		c := &claims[i]
		if c.Status.Allocation == nil {
			continue
		}
		for j := range c.Status.Allocation.Devices.Results {
			if r := &c.Status.Allocation.Devices.Results[j]; r.Driver == gpu.DriverName {
				b.addResult(c, r)
			}
		}
	}
}

// addResult adds a device that a claim was allocated. A pool has its node's name.
func (b *builder) addResult(c *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult) {
	n := b.node(r.Pool)
	at := n.gpuBuilder(gpu.DeviceName(r.Device).Whole())
	u := b.use(n, at, r)
	u.Claim = Claim{Namespace: c.Namespace, Name: c.Name, UID: string(c.UID)}
	for _, user := range b.groups.UsersOf(c) {
		if user.Pod != "" {
			pod := Pod{Namespace: c.Namespace, Name: user.Pod, UID: string(user.UID), Phase: b.phases[user.UID]}
			u.Pods = append(u.Pods, pod)
		}
		if user.Group != "" && !slices.Contains(u.PodGroups, user.Group) {
			u.PodGroups = append(u.PodGroups, user.Group)
		}
	}
	at.Uses = append(at.Uses, u)
	if !u.AdminAccess {
		at.hold(r)
	}
}

// hold notes that the device isn't free.
func (c *gpuBuilder) hold(r *resourceapi.DeviceRequestAllocationResult) {
	if c.held == nil {
		c.held, c.consumed = make(map[string]bool), make(map[string]map[resourceapi.QualifiedName]int64)
	}
	c.held[r.Device] = true
	if r.ShareID == nil {
		return
	}
	sum := c.consumed[r.Device]
	if sum == nil {
		sum = make(map[resourceapi.QualifiedName]int64)
		c.consumed[r.Device] = sum
	}
	for name, q := range r.ConsumedCapacity {
		sum[name] += q.Value()
	}
}

func (b *builder) addInventory(inv *v1alpha1.GPUInventory) {
	n := b.node(inv.Name)
	n.DriverVersion = inv.Status.DriverVersion
	for _, c := range inv.Status.Conditions {
		is := c.Status == metav1.ConditionTrue
		bad := c.Type == v1alpha1.ConditionReady && !is ||
			(c.Type == v1alpha1.ConditionConflicting || c.Type == v1alpha1.ConditionUnidentifiedGPUs) && is
		if bad {
			n.Problems = append(n.Problems, c.Reason+": "+c.Message)
		}
	}
	n.readGPUs(inv)
}

// addPolicies notes which GPUs are under which policy.
func (b *builder) addPolicies(policies []v1alpha1.SharingPolicy) {
	for i := range policies {
		for _, served := range policies[i].Status.Served {
			n := b.nodes[served.Node]
			if n == nil {
				continue
			}
			for _, name := range served.GPUs {
				if c := n.gpus[gpu.DeviceName(name)]; c != nil {
					c.Policy = policies[i].Name
				}
			}
		}
	}
}

// finish counts what fits, and puts all of a node in order.
func (b *builder) finish(n *node) {
	switch {
	case len(n.slices) == 0:
		n.Problems = append(n.Problems, "No ResourceSlices are published for it: nothing of it can be allocated.")
	case !n.complete():
		n.Problems = append(n.Problems, "Its ResourceSlices are being written: until all are there, nothing of it can be allocated.")
	}
	n.GPUs = make([]GPU, 0, len(n.gpus))
	for _, c := range n.gpus {
		c.count()
		if b.someClaims {
			c.Fits = nil
		}
		slices.SortFunc(c.Uses, compareUses)
		n.GPUs = append(n.GPUs, c.GPU)
	}
	slices.SortFunc(n.GPUs, func(a, b GPU) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Device, b.Device)) })
}

func compareUses(a, b Use) int {
	start := func(u Use) int {
		if u.Placement == nil {
			return 0
		}
		return u.Placement.Start
	}
	return cmp.Or(cmp.Compare(start(a), start(b)), cmp.Compare(a.Number, b.Number), cmp.Compare(a.Device, b.Device),
		cmp.Compare(a.Claim.Namespace, b.Claim.Namespace), cmp.Compare(a.Claim.Name, b.Claim.Name), cmp.Compare(a.ShareID, b.ShareID))
}
