package healthmonitor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Reasons of events, beside the types of conditions.
const (
	// reasonError: a GPU reported an error of a program.
	reasonError = "GPUError"
	// reasonRecovered: a condition of a GPU has ended.
	reasonRecovered = "GPURecovered"
	// reasonEnded: an admin has ended a condition of a GPU.
	reasonEnded = "GPUConditionEnded"
)

// Events writes Kubernetes events. The methods don't block.
type Events interface {
	// WarnPod writes a warning about a pod.
	WarnPod(namespace string, pod holding.Pod, reason, message string)
	// OnNode writes an event about the node's GPUs.
	OnNode(eventType, reason, message string)
}

// reportChange writes an event on the GPUInventory for each cause that began or ended, and
// on the pods that use the GPU for each that keeps new claims off it. PrepareFailed concerns no
// pod that runs: SawOutcome writes its events.
func (m *Monitor) reportChange(uuid gpu.UUID, began, ended []health.Cause) {
	for _, c := range began {
		message := fmt.Sprintf("GPU %s: %s", uuid, c.Message)
		m.cfg.Events.OnNode(corev1.EventTypeWarning, string(c.Type), message)
		if !(gpu.Condition{Type: c.Type}).Blocks() || c.Type == gpu.PrepareFailed {
			continue
		}
		for _, pod := range m.podsOn(gpu.XID{GPU: uuid}) {
			if c.Type.OnlyMPS() && !pod.MPS {
				continue
			}
			m.cfg.Events.WarnPod(pod.Namespace, holding.Pod{UID: pod.UID, Name: pod.Name}, string(c.Type), message)
		}
	}
	for _, c := range ended {
		m.cfg.Events.OnNode(corev1.EventTypeNormal, reasonRecovered, fmt.Sprintf("GPU %s: this cause of %s has ended: %q", uuid, c.Type, c.Message))
	}
}

// queue queues the notice, unless one of the same error waits already.
func (m *Monitor) queue(n health.Notice) {
	if _, waits := m.queued.LoadOrStore(errorKey(n.XID), true); waits {
		return
	}
	select {
	case m.notices <- n:
	default: // many other kinds of errors wait: drop this one
		m.queued.Delete(errorKey(n.XID))
	}
}

// errorKey is equal for XIDs of one code and one GPU or instance.
func errorKey(x gpu.XID) [4]any {
	id := func(p *int) any {
		if p == nil {
			return nil
		}
		return *p
	}
	return [4]any{x.GPU, x.Code, id(x.GPUInstance), id(x.ComputeInstance)}
}

// reportNotices writes the events of notices until ctx ends.
func (m *Monitor) reportNotices(ctx context.Context) {
	for {
		select {
		case n := <-m.notices:
			m.reportNotice(ctx, n)
			m.queued.Delete(errorKey(n.XID))
		case <-ctx.Done():
			return
		}
	}
}

// reportNotice writes events on the pods that an XID hit, and on the node.
func (m *Monitor) reportNotice(ctx context.Context, n health.Notice) {
	by := m.findAffected(ctx, n.XID)
	about := subject{gpu: n.XID.GPU, code: n.XID.Code}
	now := time.Now()
	for _, pod := range by.pods {
		about.pod = pod.UID
		if m.limiter.allow(about, now) {
			m.cfg.Events.WarnPod(pod.Namespace, holding.Pod{UID: pod.UID, Name: pod.Name}, reasonError, fmt.Sprintf("%s (GPU %s%s)", n.Message, n.XID.GPU, by.process)+by.doubt())
		}
	}
	about.pod = ""
	if m.limiter.allow(about, now) {
		m.cfg.Events.OnNode(corev1.EventTypeWarning, reasonError, fmt.Sprintf("GPU %s: %s%s%s", n.XID.GPU, n.Message, among(by.pods), by.process))
	}
}

// affected are the pods that an XID hit.
type affected struct {
	pods []Pod
	// certain: each of them was hit; otherwise one of them was.
	certain bool
	// mps: they are clients of one MPS daemon.
	mps bool
	// process names the process, ", process 4711 (train)"; empty: not known.
	process string
}

func (a affected) doubt() string {
	switch {
	case len(a.pods) < 2:
		return ""
	case a.mps:
		return fmt.Sprintf("; MPS ended the programs of all %d pods that share the GPU, and the driver may name any of them", len(a.pods))
	case a.certain:
		return ""
	}
	return fmt.Sprintf("; it is an error of one of the %d pods that share the GPU", len(a.pods))
}

// findAffected returns the pods that an XID hit: those of the processes that the
// kernel log names, else all that use the GPU or instance. A process of no pod is one
// of the host, such as an MPS server, which works for pods.
//
// An error of one client ends all clients of an MPS server, and the kernel log names
// any of them: on an H200 with driver 580 it was the one that had done nothing.
func (m *Monitor) findAffected(ctx context.Context, x gpu.XID) affected {
	holders := m.podsOn(x)
	a := affected{certain: true}
	for _, s := range m.log.find(ctx, x, m.addressOf(x.GPU)) {
		a.process = fmt.Sprintf(", process %d (%s)", s.Process.PID, s.Process.Name)
		i := slices.IndexFunc(holders, func(p Pod) bool { return p.UID == s.pod.UID })
		switch {
		case i >= 0:
			s.pod = holders[i]
		case s.pod.Name == "" || strings.HasPrefix(s.Process.Name, mpsServer):
			continue
		}
		if !slices.Contains(a.pods, s.pod) {
			a.pods = append(a.pods, s.pod)
		}
	}
	clients := slices.DeleteFunc(slices.Clone(holders), func(p Pod) bool { return !p.MPS })
	switch {
	case slices.ContainsFunc(a.pods, func(p Pod) bool { return p.MPS }), len(a.pods) == 0 && len(clients) == len(holders):
		return affected{pods: clients, mps: true, process: a.process}
	case len(a.pods) > 0:
		return a
	}
	return affected{pods: holders, process: a.process}
}

// mpsServer begins the name of an MPS server, of which the kernel keeps 15 bytes.
const mpsServer = "nvidia-cuda-mps"

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
