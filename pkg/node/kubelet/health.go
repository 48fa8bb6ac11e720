package kubelet

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

const (
	// healthKnownWithin is how old the facts may be by which the kubelet is told that a
	// device is healthy.
	healthKnownWithin = 20 * time.Second
	// healthTimeout is how long a report counts: with healthKnownWithin no more than 30
	// seconds. Kubernetes 1.34 doesn't read it, and takes 30 seconds.
	healthTimeout = 10 * time.Second
	// healthEvery is how often the health is reported again.
	healthEvery = 5 * time.Second
)

// WatchHealthStatus reports the health until ctx ends. The kubelet takes
// each report as one of the devices in it; it asks for the health of allocated devices
// only. Once another plugin takes over, it ends the stream so that the kubelet doesn't
// ask again.
func (h *handler) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	for {
		called := h.gate.changed() // a prepare among others
		if h.gate.handedOver() {
			return kubeletplugin.ErrHealthNotSupported
		}
		devices, changed := h.cfg.deviceHealth()
		select {
		case reports <- kubeletplugin.DeviceHealthReport{Devices: devices}:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-changed:
		case <-called:
		case <-time.After(healthEvery):
		case <-ctx.Done():
			return nil
		}
	}
}
