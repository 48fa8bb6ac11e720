package view

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// PageNode is a node as `kubectl gpu web` draws it: the model, with states and places.
type PageNode struct {
	Node
	// Pool is the group of nodes in which the node is shown.
	Pool string    `json:"pool"`
	GPUs []PageGPU `json:"gpus"`
}

// PageGPU is a GPU of a PageNode.
type PageGPU struct {
	GPU
	State State `json:"state"`
	// Unhealthy: it has a condition, or a taint keeps claims off a device of it.
	Unhealthy bool      `json:"unhealthy,omitempty"`
	Segments  []Segment `json:"segments"`
	// Used is the fraction of the memory that segments and MIG instances of others cover.
	Used float64 `json:"used"`
}

// State is one word for the use of a GPU by old and new claims.
type State string

// The states of a GPU.
const (
	// StateFree: no claim has a part of it, and something fits.
	StateFree State = "free"
	// StatePartly: a claim has a part of it, or it has a MIG instance, and something fits.
	StatePartly State = "partly"
	// StateFull: it is in use, and nothing else fits.
	StateFull State = "full"
	// StateBlocked: a condition or a taint keeps new claims off all of it.
	StateBlocked State = "blocked"
	// StateWithheld: nothing of it is offered, or nothing of it can be allocated, for
	// another reason.
	StateWithheld State = "withheld"
	// StateUnknown: not all claims can be seen.
	StateUnknown State = "unknown"
)

// Segment is a range of a GPU's memory that uses have: equal shares and replicas lie
// side by side in their GPU or partition, and shares by size have their sizes. Uses
// with admin access have none.
type Segment struct {
	// Start and Size are fractions of the GPU's memory.
	Start float64 `json:"start"`
	Size  float64 `json:"size"`
	// Uses are indexes of the GPU's uses: several claims can have the same device.
	Uses []int `json:"uses"`
}

// Page derives the page's data from a node in a pool.
func Page(n Node, pool string) PageNode {
	out := PageNode{Node: n, Pool: pool, GPUs: make([]PageGPU, 0, len(n.GPUs))}
	for _, g := range n.GPUs {
		p := PageGPU{GPU: g, State: g.state(), Unhealthy: len(g.Conditions) > 0 || g.tainted(), Segments: g.segments()}
		p.Used = covered(g, p.Segments)
		out.GPUs = append(out.GPUs, p)
	}
	return out
}

// Outline returns the node with the fields that cells, totals and conditions are drawn
// from, and without those that grow with the claims on its GPUs.
func (n PageNode) Outline() PageNode {
	gpus := make([]PageGPU, len(n.GPUs))
	for i, g := range n.GPUs {
		gpus[i] = PageGPU{
			GPU: GPU{
				Device: g.Device, Index: g.Index, MemoryBytes: g.MemoryBytes, Offered: g.Offered, Conditions: g.Conditions, Taints: g.Taints,
				Fits: g.Fits,
			},
			State: g.State, Unhealthy: g.Unhealthy, Used: g.Used,
		}
	}
	return PageNode{Node: Node{Name: n.Name, Rank: n.Rank, Problems: n.Problems}, Pool: n.Pool, GPUs: gpus}
}

// tainted reports whether a taint keeps claims off a device of the GPU.
func (g *GPU) tainted() bool {
	return slices.ContainsFunc(g.Taints, func(t Taint) bool { return t.Effect != "None" })
}

func (g *GPU) state() State {
	fits := slices.ContainsFunc(g.Fits, func(f Fit) bool { return f.Count > 0 })
	used := len(g.Instances) > 0 || slices.ContainsFunc(g.Uses, func(u Use) bool { return !u.AdminAccess })
	switch {
	case fits && used:
		return StatePartly
	case fits:
		return StateFree
	case g.tainted() || !g.Offered && len(g.Conditions) > 0:
		return StateBlocked
	case !g.Offered:
		return StateWithheld
	case g.Fits == nil:
		return StateUnknown
	case used:
		return StateFull
	default:
		return StateWithheld
	}
}

// segments places the uses other than admin access, which doesn't keep other claims off.
func (g *GPU) segments() []Segment {
	out := []Segment{}
	stacked := make(map[Placement]float64) // by partition: the sum of its shares by size
	for i := range g.Uses {
		u := &g.Uses[i]
		if u.AdminAccess {
			continue
		}
		s := Segment{Size: 1, Uses: []int{i}}
		var in Placement
		if u.Placement != nil && g.MemorySlices > 0 {
			in = *u.Placement
			s.Start, s.Size = float64(in.Start)/float64(g.MemorySlices), float64(in.Size)/float64(g.MemorySlices)
		}
		switch {
		case u.Count > 0:
			s.Size /= float64(u.Count)
			s.Start += float64(u.Number) * s.Size
		case u.Type == gpu.TypeMPS && g.MemoryBytes > 0:
			end := s.Start + s.Size
			s.Start = min(s.Start+stacked[in], end)
			s.Size = min(float64(u.MemoryBytes)/float64(g.MemoryBytes), end-s.Start)
			stacked[in] += s.Size
		}
		k := slices.IndexFunc(out, func(o Segment) bool { return o.Start == s.Start && o.Size == s.Size })
		if k >= 0 {
			out[k].Uses = append(out[k].Uses, i)
			continue
		}
		out = append(out, s)
	}
	return out
}

// covered is the fraction of the memory that is in use.
func covered(g GPU, of []Segment) float64 {
	sum := 0.
	for _, s := range of {
		sum += s.Size
	}
	for _, x := range g.Instances {
		sum += float64(x.Placement.Size) / float64(max(1, g.MemorySlices))
	}
	return min(1, sum)
}

// PoolLabels are the labels by which platforms name a node's pool.
func PoolLabels() []string {
	return []string{
		"karpenter.sh/nodepool", "cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "kubernetes.azure.com/agentpool",
		"doks.digitalocean.com/node-pool", "kops.k8s.io/instancegroup",
	}
}

// Pool names the pool of a node: the first of the labels that it has, or else the
// models of its GPUs.
func Pool(n Node, labels map[string]string, keys []string) string {
	for _, k := range keys {
		if v := labels[k]; v != "" {
			return v
		}
	}
	var models []string
	for _, g := range n.GPUs {
		if m := cmp.Or(g.Model, "unknown model"); !slices.Contains(models, m) {
			models = append(models, m)
		}
	}
	slices.Sort(models)
	return cmp.Or(strings.Join(models, " + "), "without GPUs")
}

// WaitingPod is a pod that no node has been found for, or whose node hasn't started it.
type WaitingPod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Node is the one that the pod is bound to, if any. Since is when it was bound, or without a
	// node, created.
	Node  string      `json:"node,omitempty"`
	Since metav1.Time `json:"since"`
	// Wants are the names of the pod's claims, and its extended resources.
	Wants []string `json:"wants"`
	// Message is the scheduler's; empty where it said nothing yet.
	Message string `json:"message,omitempty"`
}

// Waiting returns the pods that want devices and wait for a node, or to be started there, the
// oldest first. Those that a scheduling gate holds back don't wait for devices. A pod that was
// bound just now is among them, although nothing may be wrong.
func Waiting(pods []corev1.Pod) []WaitingPod {
	out := []WaitingPod{}
	for i := range pods {
		p := &pods[i]
		if p.Status.Phase != corev1.PodPending || p.Spec.NodeName != "" && !hangs(p) || p.DeletionTimestamp != nil || len(p.Spec.SchedulingGates) > 0 {
			continue
		}
		w := WaitingPod{Namespace: p.Namespace, Name: p.Name, Node: p.Spec.NodeName, Since: p.CreationTimestamp, Wants: wants(p)}
		for _, c := range p.Status.Conditions {
			switch {
			case c.Type != corev1.PodScheduled:
			case c.Status == corev1.ConditionFalse:
				w.Message = c.Message
			case w.Node != "":
				w.Since = c.LastTransitionTime
			}
		}
		if len(w.Wants) > 0 {
			out = append(out, w)
		}
	}
	slices.SortFunc(out, func(a, b WaitingPod) int {
		return cmp.Or(a.Since.Compare(b.Since.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// hangs reports whether a pod on a node has no sandbox yet, before which the kubelet prepares its
// claims, or has a container that can't be created or started, perhaps because of its devices.
func hangs(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReadyToStartContainers && c.Status == corev1.ConditionFalse {
			return true
		}
	}
	return slices.ContainsFunc(slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses), func(c corev1.ContainerStatus) bool {
		w := c.State.Waiting
		return w != nil && (w.Reason == "CreateContainerError" || w.Reason == "RunContainerError")
	})
}

func wants(p *corev1.Pod) []string {
	var out []string
	for _, c := range p.Spec.ResourceClaims {
		out = append(out, c.Name)
	}
	for _, c := range p.Spec.Containers {
		for name := range c.Resources.Requests {
			if strings.HasPrefix(string(name), gpu.ResourceDomain+"/") || strings.HasPrefix(string(name), resourceapi.ResourceDeviceClassPrefix) {
				out = append(out, string(name))
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Policy is a SharingPolicy in short.
type Policy struct {
	Name string `json:"name"`
	// GPUs and Nodes under it that are published.
	GPUs  int32 `json:"gpus"`
	Nodes int32 `json:"nodes"`
	// Applied: all GPUs are offered as it plans.
	Applied bool `json:"applied"`
	// Problems are sentences: why it was refused or isn't applied.
	Problems []string `json:"problems,omitempty"`
}

// Policies returns the policies in short, by name.
func Policies(all []v1alpha1.SharingPolicy) []Policy {
	out := make([]Policy, 0, len(all))
	for i := range all {
		s := &all[i].Status
		p := Policy{Name: all[i].Name, GPUs: s.GPUs, Nodes: s.Nodes}
		for _, c := range s.Conditions {
			switch {
			case c.Type == v1alpha1.ConditionApplied && c.Status == metav1.ConditionTrue:
				p.Applied = true
			case c.Type == v1alpha1.ConditionApplied || c.Type == v1alpha1.ConditionAccepted && c.Status == metav1.ConditionFalse:
				p.Problems = append(p.Problems, c.Reason+": "+c.Message)
			}
		}
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b Policy) int { return cmp.Compare(a.Name, b.Name) })
	return out
}
