package health

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// Reasons of events, beside the types of conditions.
const (
	// reasonError: a GPU reported an error of a program.
	reasonError = "GPUError"
	// reasonRecovered: a condition of a GPU has ended.
	reasonRecovered = "GPURecovered"
)

// Events are told to people. The methods don't block.
type Events interface {
	// OnPod writes a warning about a pod.
	OnPod(pod Pod, reason, message string)
	// OnNode writes an event about the node's GPUs.
	OnNode(eventType, reason, message string)
}

// tellChange tells which causes began and ended.
func (m *Monitor) tellChange(uuid gpu.UUID, began, ended []health.Cause) {
	for _, c := range began {
		m.cfg.Events.OnNode(corev1.EventTypeWarning, string(c.Type), fmt.Sprintf("GPU %s: %s", uuid, c.Message))
	}
	for _, c := range ended {
		m.cfg.Events.OnNode(corev1.EventTypeNormal, reasonRecovered, fmt.Sprintf("GPU %s: %s has ended: %s", uuid, c.Type, c.Message))
	}
}

// tellNotice tells the pods that an XID may have hit, and the node.
func (m *Monitor) tellNotice(n health.Notice) {
	pods := m.cfg.Holders(n.XID)
	onPod := fmt.Sprintf("%s (GPU %s)", n.Message, n.XID.GPU)
	if len(pods) > 1 {
		onPod += fmt.Sprintf("; it is an error of one of the %d pods that share the GPU", len(pods))
	}
	about := subject{gpu: n.XID.GPU, code: n.XID.Code}
	now := time.Now()
	for _, pod := range pods {
		about.pod = pod.UID
		if m.told.allow(about, now) {
			m.cfg.Events.OnPod(pod, reasonError, onPod)
		}
	}
	about.pod = ""
	if m.told.allow(about, now) {
		m.cfg.Events.OnNode(corev1.EventTypeWarning, reasonError, fmt.Sprintf("GPU %s: %s%s", n.XID.GPU, n.Message, among(pods)))
	}
}

// among names the pods: " (pods default/a, default/b)"; the first few of many.
func among(pods []Pod) string {
	const most = 8
	var names []string
	for _, p := range pods {
		names = append(names, p.Namespace+"/"+p.Name)
	}
	slices.Sort(names)
	if len(names) > most {
		names = append(names[:most], fmt.Sprintf("%d more", len(names)-most))
	}
	switch len(pods) {
	case 0:
		return ""
	case 1:
		return " (pod " + names[0] + ")"
	default:
		return " (pods " + strings.Join(names, ", ") + ")"
	}
}
