package why

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

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
	all, free := 0, 0
	ranks := make(map[string]int) // of those that are free
	for _, n := range nodes {
		if len(n.GPUs) < most {
			continue
		}
		all++
		if !slices.ContainsFunc(n.GPUs, func(g view.GPU) bool { return len(g.Uses) > 0 || len(g.Taints) > 0 || !g.Offered }) {
			free++
			ranks[n.Rank]++
		}
	}
	soft, hard := ranks[rank.Rank{Taints: rank.Most}.String()], ranks[rank.Rank{Hard: true}.String()]
	text := fmt.Sprintf("It needs %d GPUs of one node: of %d such nodes, %d are wholly free, %d of these in the reserve", most, all, free, soft+hard)
	if hard > 0 && !toleratesReserve(pod) {
		text += fmt.Sprintf("; %d take only pods that tolerate %s", hard, rank.ReserveKey)
	}
	return []string{text + "."}
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

func toleratesReserve(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool {
		return (t.Key == rank.ReserveKey || t.Key == "") && t.Operator == corev1.TolerationOpExists && (t.Effect == "" || t.Effect == corev1.TaintEffectNoSchedule)
	})
}
