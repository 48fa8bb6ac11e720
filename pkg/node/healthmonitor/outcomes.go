package healthmonitor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// SawOutcome handles the outcome of a prepare. A refusal begins the condition PrepareFailed, or
// counts as a try, or adds its device, and the pods of the claim are told. The condition ends
// when a claim was given some of the silicon that others were refused. It is for one goroutine.
func (m *Monitor) SawOutcome(ctx context.Context, o prepare.Outcome) {
	w := m.getOrAdd(o.GPU)
	if o.Problem == "" {
		m.change(ctx, w, func(s health.State) health.State {
			if !m.needsRefused(s, o.Silicon) {
				return s
			}
			return s.ObservePrepared(o.At)
		})
		return
	}
	refusal := health.Refusal{
		Device: o.Device, Message: fmt.Sprintf("a claim could not be given %s: the GPU %s", o.Device, o.Problem), At: o.At, Load: o.Load,
	}
	m.change(ctx, w, func(s health.State) health.State { return s.ObserveRefusal(refusal) })
	m.warnRefused(o, m.stateOf(w))
}

// needsRefused reports whether silicon that a claim was given is, or overlaps with, some that
// others were refused. It need not be a refused device: after half an hour, others that need
// the same are offered to be tried. It may be any silicon if the GPU's tables don't list the refused
// device any more.
func (m *Monitor) needsRefused(s health.State, silicon gpu.Device) bool {
	return slices.ContainsFunc(prepareFailed(s).Refused, func(name gpu.DeviceName) bool {
		d, _, _ := m.cfg.Facts.Device(name) // also if its GPU doesn't answer
		return d == nil || gpu.Base(d) == silicon || gpu.NeedsSilicon(silicon, d)
	})
}

// prepareFailed returns the condition of this type; the zero Condition if there is none.
func prepareFailed(s health.State) gpu.Condition {
	all := s.Conditions()
	if i := slices.IndexFunc(all, func(c gpu.Condition) bool { return c.Type == gpu.PrepareFailed }); i >= 0 {
		return all[i]
	}
	return gpu.Condition{}
}

// warnRefused writes an event on the pods of a claim that was refused a device.
func (m *Monitor) warnRefused(o prepare.Outcome, s health.State) {
	now := time.Now()
	name := "GPU " + string(o.GPU)
	if g, ok := m.gpu(o.GPU); ok {
		name = fmt.Sprintf("GPU %d", g.Index)
	}
	part := "it"
	if _, ok := o.Silicon.(gpu.Partition); ok {
		part = "that part of it"
	}
	message := fmt.Sprintf("%s %s; %s gets no new pods for %s", name, o.Problem, part, inWords(prepareFailed(s).RetryAt.Sub(now)))
	for _, pod := range o.Pods {
		if m.refusals.allow(subject{pod: pod.UID, gpu: o.GPU}, now) {
			m.cfg.Events.WarnPod(o.Namespace, pod, string(gpu.PrepareFailed), message)
		}
	}
}

// inWords returns a time in minutes, or in seconds if it is shorter than about a minute.
func inWords(d time.Duration) string {
	n, unit := int(d.Round(time.Minute)/time.Minute), "minutes"
	if d < time.Minute-2*time.Second {
		n, unit = max(1, int(d.Round(time.Second)/time.Second)), "seconds"
	}
	if n == 1 {
		unit = strings.TrimSuffix(unit, "s")
	}
	return fmt.Sprintf("%d %s", n, unit)
}
