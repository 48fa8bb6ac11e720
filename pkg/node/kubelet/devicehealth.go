package kubelet

import (
	"cmp"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// deviceHealth returns the health of the devices that claims hold, and a channel that is closed
// when the facts change, by which it may have changed, too. A device isn't healthy unless that
// was true healthKnownWithin ago or later.
func (c Config) deviceHealth() ([]kubeletplugin.DeviceHealth, <-chan struct{}) {
	state, changed := c.Facts.State()
	outdated := c.Facts.Outdated(healthKnownWithin)
	var all []kubeletplugin.DeviceHealth
	for _, r := range c.Journal.Claims() {
		for _, held := range r.Holdings {
			d := kubeletplugin.DeviceHealth{PoolName: c.Pool, DeviceName: string(held.Device), HealthCheckTimeout: healthTimeout}
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
// messages of the GPU's conditions that concern the device.
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
		if c.Type.OnlyMPS() && held.MPS == nil || !concerns(c, held, state.Node.GPUs) {
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

// concerns reports whether a condition of its GPU is about a claim's device.
func concerns(c gpu.Condition, held holding.Holding, gpus []gpu.GPU) bool {
	return c.Type != gpu.PrepareFailed || c.BlocksDevice(held.Device, gpu.NameAll(gpus))
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
