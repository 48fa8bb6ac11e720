package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// severity of a finding. They are those of `kubelet-plugin doctor`, and one more.
type severity string

const (
	// trouble is wrong: somebody has to act.
	trouble severity = "trouble"
	// warning may become trouble, or is less than somebody wanted.
	warning severity = "warning"
	// leftover is removed automatically; only plugins report it.
	leftover severity = "leftover"
	// note is information.
	note severity = "note"
)

// finding is one result of the doctor.
type finding struct {
	Level severity `json:"level"`
	// Check is the fixed name of the rule.
	Check string `json:"check"`
	Node  string `json:"node,omitempty"`
	// Subject is the GPU, device, pod, claim or policy that the finding is about.
	Subject string `json:"subject,omitempty"`
	What    string `json:"what"`
	Do      string `json:"do,omitempty"`
}

// patient is a cluster as the doctor sees it.
type patient struct {
	view.Objects

	// tesseraPods are Tessera's own, if they could be listed.
	tesseraPods     []corev1.Pod
	tesseraPodsRead bool
	daemonSets      daemonSets
}

// examine returns the findings, the worst first.
func (p *patient) examine() []finding {
	var out []finding
	for i := range p.Inventories {
		out = append(out, p.node(&p.Inventories[i])...)
	}
	for i := range p.Policies {
		out = append(out, examinePolicy(&p.Policies[i])...)
	}
	for i := range p.tesseraPods {
		out = append(out, examinePod(&p.tesseraPods[i])...)
	}
	out = append(out, p.daemonSets.examine()...)
	out = append(out, p.claims()...)
	sortFindings(out)
	return out
}

func sortFindings(all []finding) {
	rank := map[severity]int{trouble: 0, warning: 1, leftover: 2, note: 3}
	slices.SortStableFunc(all, func(a, b finding) int {
		return cmp.Or(cmp.Compare(rank[a.Level], rank[b.Level]), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Check, b.Check), cmp.Compare(a.Subject, b.Subject))
	})
}

// node examines a node's GPUInventory and slices.
func (p *patient) node(inv *v1alpha1.GPUInventory) []finding {
	out := slices.Concat(examinePlugin(inv), examineAllocations(inv), examineGPUs(inv))
	for i := range out {
		out[i].Node = inv.Name
	}
	if meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionReady) && len(inv.Status.GPUs) > 0 && !p.publishes(inv.Name) {
		out = append(out, finding{
			Level: trouble, Check: "not-published", Node: inv.Name, What: "The node has no complete set of ResourceSlices: nothing of it can be allocated.",
			Do: "If it stays so for a minute, look at the controller's log.",
		})
	}
	return out
}

func examinePlugin(inv *v1alpha1.GPUInventory) []finding {
	var out []finding
	ready := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionReady)
	switch {
	case ready == nil:
		out = append(out, finding{
			Level: trouble, Check: "plugin-not-ready", What: "The node's plugin hasn't reported yet.", Do: "Look at the log of the plugin's pod on the node.",
		})
	case ready.Reason == v1alpha1.ReasonPluginSilent:
		out = append(out, finding{
			Level: trouble, Check: "plugin-silent", What: ready.Message,
			Do: "Look at the plugin's pod on the node and at the kubelet: claims on the node can't be prepared.",
		})
	case ready.Status != metav1.ConditionTrue:
		out = append(out, finding{Level: trouble, Check: "plugin-not-ready", What: ready.Reason + ": " + ready.Message})
	}
	if c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionConflicting); c != nil && c.Status == metav1.ConditionTrue {
		out = append(out, finding{
			Level: trouble, Check: "other-driver", What: c.Reason + ": " + c.Message,
			Do: "Only one driver may serve the GPUs of a node: remove the other one from it.",
		})
	}
	if c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionUnidentifiedGPUs); c != nil && c.Status == metav1.ConditionTrue {
		out = append(out, finding{
			Level: trouble, Check: "gpus-not-identified", What: c.Message,
			Do: "Look at nvidia-smi -L and at the kernel log of the node: the GPU or its connection is broken, mostly.",
		})
	}
	if c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionOverwritten); c != nil && c.Status == metav1.ConditionTrue {
		out = append(out, finding{Level: trouble, Check: "overwritten", What: c.Reason + ": " + c.Message})
	}
	return out
}

func examineAllocations(inv *v1alpha1.GPUInventory) []finding {
	c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionDoubleAllocation)
	if c == nil || c.Status != metav1.ConditionTrue {
		return nil
	}
	return []finding{{
		Level: trouble, Check: "double-allocation", What: c.Message,
		Do: "Delete the pod of the refused claim: a new one gets another device. Upgrade the scheduler (" + cluster.Documents + "compatibility.md#double-allocation); " +
			"after that, delete the GPUInventory, unless the API server was upgraded too.",
	}}
}

func examineGPUs(inv *v1alpha1.GPUInventory) []finding {
	var out []finding
	all := inventory.Node(inv).GPUs
	for _, g := range all {
		subject := fmt.Sprintf("GPU %d", g.Index)
		another := func(o gpu.GPU) bool { return o.Index == g.Index && o.UUID != g.UUID }
		if g.Index < 0 || slices.ContainsFunc(all, another) {
			subject = "GPU " + string(g.UUID)
		}
		for _, c := range g.Conditions {
			level, what := note, string(c.Type)
			if c.Blocks() {
				level = trouble
			} else if c.Effect() != gpu.NoTaint {
				level = warning
			}
			if c.Message != "" {
				what += ": " + c.Message
			}
			out = append(out, finding{
				Level: level, Check: "gpu-condition", Subject: subject, What: what,
				Do: "See what follows from the condition, and how it ends: " + cluster.Documents + "health.md",
			})
		}
	}
	return out
}

// publishes reports whether the newest generation of a node's slices is complete. It
// reports true where no slices could be read.
func (p *patient) publishes(node string) bool {
	if p.Slices == nil {
		return true
	}
	var newest, count, want int64
	for i := range p.Slices {
		s := &p.Slices[i].Spec
		if s.NodeName == nil || *s.NodeName != node {
			continue
		}
		if s.Pool.Generation > newest || count == 0 {
			newest, count, want = s.Pool.Generation, 0, s.Pool.ResourceSliceCount
		}
		if s.Pool.Generation == newest {
			count++
		}
	}
	return count > 0 && count == want
}

// examinePolicy reads the controller's conditions of a policy.
func examinePolicy(s *v1alpha1.SharingPolicy) []finding {
	var out []finding
	add := func(level severity, check, what, do string) {
		out = append(out, finding{Level: level, Check: check, Subject: "SharingPolicy " + s.Name, What: what, Do: do})
	}
	if s.Status.ObservedGeneration != s.Generation {
		add(warning, "policy-not-read", "The controller hasn't looked at the policy's last change.", "If it stays so for a minute, look at the controller's log.")
	}
	if c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionAccepted); c != nil && c.Status == metav1.ConditionFalse {
		add(trouble, "policy-refused", c.Message, "Correct the spec; until then the form that was accepted last stays in force.")
	}
	c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionApplied)
	if c == nil || c.Status == metav1.ConditionTrue {
		return out
	}
	switch c.Reason {
	case v1alpha1.ReasonWaiting:
		add(note, "devices-waiting", c.Message, "Nothing: the devices go when their claims end.")
	case v1alpha1.ReasonNoGPUs:
		add(note, "policy-without-gpus", c.Message, "")
	default:
		add(warning, "policy-not-applied", c.Reason+": "+c.Message, "kubectl gpu policy "+s.Name+" shows more.")
	}
	return out
}

// examinePod looks at one of Tessera's pods.
func examinePod(p *corev1.Pod) []finding {
	if p.Status.Phase == corev1.PodSucceeded || p.DeletionTimestamp != nil {
		return nil
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	why := "it isn't ready"
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := c.State.Waiting; w != nil {
			why = strings.TrimSuffix(fmt.Sprintf("container %s waits: %s: %s", c.Name, w.Reason, w.Message), ": ")
		}
	}
	if p.Spec.NodeName == "" {
		why = "it isn't scheduled"
	}
	return []finding{{
		Level: trouble, Check: "pod-not-ready", Node: p.Spec.NodeName, Subject: "pod " + p.Namespace + "/" + p.Name, What: "The " + cmp.Or(p.Labels[cluster.ComponentLabel], "unknown") + " pod serves nobody: " + why + ".",
		Do: fmt.Sprintf("kubectl describe pod %s -n %s", p.Name, p.Namespace),
	}}
}

// claims looks for nodes without a plugin, and claims there.
func (p *patient) claims() []finding {
	var out []finding
	reported, served := sets.New[string](), sets.New[string]()
	for i := range p.Inventories {
		reported.Insert(p.Inventories[i].Name)
	}
	for i := range p.tesseraPods {
		if p.tesseraPods[i].Labels[cluster.ComponentLabel] == cluster.NodeComponent {
			served.Insert(p.tesseraPods[i].Spec.NodeName)
		}
	}
	for node := range reported.Difference(served) {
		if p.tesseraPodsRead {
			out = append(out, finding{Level: trouble, Check: "no-plugin", Node: node, What: "The node has a GPUInventory and no plugin's pod.",
				Do: "Look at the DaemonSet's node affinity and tolerations, and at taints of the node."})
		}
	}
	for i := range p.Claims {
		c := &p.Claims[i]
		if c.Status.Allocation == nil || len(reported) == 0 {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if r.Driver == gpu.DriverName && !reported.Has(r.Pool) {
				out = append(out, finding{Level: warning, Check: "claim-without-node", Node: r.Pool, Subject: "claim " + c.Namespace + "/" + c.Name,
					What: fmt.Sprintf("The claim has device %s of a node without a GPUInventory.", r.Device), Do: "If the node is gone for good, delete the claim's pods."})
				break
			}
		}
	}
	return out
}
