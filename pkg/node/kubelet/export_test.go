package kubelet

import (
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// LookOften makes a plugin check the sockets every 10 milliseconds.
func (p *Plugin) LookOften() { p.every = 10 * time.Millisecond }

// NewHandler returns what answers a kubelet's calls, without sockets.
func NewHandler(claims Claims, health Health) kubeletplugin.DRAPlugin {
	return newHandler(Config{Claims: claims, Health: health}, nil, nil)
}
