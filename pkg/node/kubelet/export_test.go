package kubelet

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// LookOften makes a plugin check the sockets every 10 milliseconds.
func (p *Plugin) LookOften() { p.every = 10 * time.Millisecond }

// NewHandler returns what answers a kubelet's calls, without sockets.
func NewHandler(claims Claims, health Health) kubeletplugin.DRAPlugin {
	return newHandler(Config{Claims: claims, Health: health}, nil, nil)
}

// ReportConflict reports the result of a check for other drivers.
func (p *Plugin) ReportConflict(ctx context.Context, err error) { p.reportConflict(ctx, err) }
