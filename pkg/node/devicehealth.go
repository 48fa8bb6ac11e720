package node

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

// deviceHealth knows how the devices are that claims hold.
type deviceHealth struct {
	pool    string
	journal *journal.Journal
	facts   *facts.Facts
	// outdated returns an error if the facts may not be true any more, because for
	// longer than after it wasn't possible to find out.
	outdated func(after time.Duration) error
}

// report implements kubelet.Health.
func (h deviceHealth) report() ([]kubeletplugin.DeviceHealth, <-chan struct{}) {
	state, changed := h.facts.State()
	outdated := h.outdated(kubelet.HealthKnownWithin)
	var all []kubeletplugin.DeviceHealth
	for _, r := range h.journal.Claims() {
		for _, held := range r.Holdings {
			d := kubeletplugin.DeviceHealth{PoolName: h.pool, DeviceName: string(held.Device)}
			if outdated != nil {
				d.Health, d.Message = kubeletplugin.HealthStatusUnknown, outdated.Error()
			} else {
				d.Health, d.Message = reportedHealth(state, held)
			}
			all = append(all, d)
		}
	}
	// Several claims can have shares of one device, or look at it as an administrator: the
	// first in this order is reported.
	order := worstFirst()
	slices.SortFunc(all, func(a, b kubeletplugin.DeviceHealth) int {
		return cmp.Or(
			cmp.Compare(a.DeviceName, b.DeviceName),
			cmp.Compare(slices.Index(order, a.Health), slices.Index(order, b.Health)),
			cmp.Compare(len(b.Message), len(a.Message)), // the longer one lists more conditions
		)
	})
	return slices.CompactFunc(all, func(a, b kubeletplugin.DeviceHealth) bool { return a.DeviceName == b.DeviceName }), changed
}

// worstFirst returns all healths.
func worstFirst() []kubeletplugin.HealthStatus {
	return []kubeletplugin.HealthStatus{kubeletplugin.HealthStatusUnhealthy, kubeletplugin.HealthStatusUnknown, kubeletplugin.HealthStatusHealthy}
}

// reportedHealth returns the health of a claim's device: that of its GPU, with the
// messages of the GPU's conditions.
func reportedHealth(state facts.State, held holding.Holding) (kubeletplugin.HealthStatus, string) {
	if !state.Known || state.Trouble != (facts.Trouble{}) {
		return kubeletplugin.HealthStatusUnknown, cmp.Or(state.Trouble.Message, "the GPUs of this node have not been read yet")
	}
	i := slices.IndexFunc(state.Node.GPUs, func(g gpu.GPU) bool { return g.UUID == held.GPU })
	if i < 0 {
		return kubeletplugin.HealthStatusUnknown, "this node has no GPU " + string(held.GPU) + " now"
	}
	byHealth := map[kubeletplugin.HealthStatus][]string{}
	for _, c := range state.Node.GPUs[i].Conditions {
		if c.Type.OnlyMPS() && held.MPS == nil {
			continue
		}
		is := healthWith(c)
		byHealth[is] = append(byHealth[is], string(c.Type)+": "+c.Message)
	}
	health := kubeletplugin.HealthStatusHealthy
	var messages []string
	for _, is := range worstFirst() {
		if len(messages) == 0 && len(byHealth[is]) > 0 {
			health = is
		}
		messages = append(messages, byHealth[is]...)
	}
	return health, strings.Join(messages, "; ")
}

// healthWith returns the health of a GPU that has this condition only.
func healthWith(c gpu.Condition) kubeletplugin.HealthStatus {
	switch {
	case c.Type == gpu.NotResponding, c.Type == gpu.Unreadable:
		return kubeletplugin.HealthStatusUnknown
	case c.Type == gpu.StateUnreadable: // says who may hold the GPU, nothing of the hardware
		return kubeletplugin.HealthStatusHealthy
	case c.Blocks():
		return kubeletplugin.HealthStatusUnhealthy
	default:
		return kubeletplugin.HealthStatusHealthy
	}
}
