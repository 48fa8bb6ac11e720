package why

import (
	"fmt"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
	"github.com/tessera-dra/tessera/pkg/rank"
)

// wholeNodes says how many nodes are wholly free, for a pod whose claims need all GPUs of the
// largest nodes, in a sentence; none for another pod.
func wholeNodes(pod *corev1.Pod, waiting []*resourceapi.ResourceClaim, o fit.Objects) []string {
	nodes := view.Build(view.Objects{Slices: o.Slices, Claims: o.Claims, TaintRules: o.TaintRules, Nodes: o.Nodes}).Nodes
	most := 0
	for _, n := range nodes {
		most = max(most, len(n.GPUs))
	}
	if most < 2 || asked(waiting, most) < most {
		return nil
	}
	nodes = slices.DeleteFunc(nodes, func(n view.Node) bool { return len(n.GPUs) < most })
	ranks := ranksOf(o.Nodes)
	free, reserved, hard := 0, 0, 0
	for _, n := range nodes {
		if slices.ContainsFunc(n.GPUs, unavailable) {
			continue
		}
		free++
		switch r := ranks[n.Name]; {
		case r.Hard:
			hard++
		case r.Reserve():
			reserved++
		}
	}
	text := fmt.Sprintf("It needs %d GPUs of one node: of %d such nodes, %d are wholly free, %d of these in the reserve", most, len(nodes), free, reserved+hard)
	if hard > 0 && !toleratesReserve(pod) {
		text += fmt.Sprintf("; %d take only pods that tolerate %s", hard, rank.ReserveKey)
	}
	return []string{text + "."}
}

// unavailable reports whether no pod could have the whole GPU now.
func unavailable(g view.GPU) bool { return len(g.Uses) > 0 || len(g.Taints) > 0 || !g.Offered }

func ranksOf(nodes []corev1.Node) map[string]rank.Rank {
	ranks := make(map[string]rank.Rank, len(nodes))
	for i := range nodes {
		ranks[nodes[i].Name] = rank.Of(nodes[i].Spec.Taints)
	}
	return ranks
}

// asked counts the whole GPUs that claims ask for by the chart's class. All of a node's are most.
func asked(waiting []*resourceapi.ResourceClaim, most int) int {
	n := 0
	for _, c := range waiting {
		for _, r := range c.Spec.Devices.Requests {
			switch e := r.Exactly; {
			case e == nil || e.DeviceClassName != gpu.ClassGPU:
			case e.AllocationMode == resourceapi.DeviceAllocationModeAll:
				n += most
			default:
				n += int(max(1, e.Count))
			}
		}
	}
	return n
}

// toleratesReserve reports whether the pod may be placed on nodes of the hard reserve.
func toleratesReserve(pod *corev1.Pod) bool {
	taints, _ := rank.Rank{Hard: true}.Apply(nil)
	_, kept := corev1helpers.FindMatchingUntoleratedTaint(logr.Discard(), taints, pod.Spec.Tolerations, nil, false)
	return !kept
}
