package kubelet

import (
	"context"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
)

// LookOften makes a plugin check the sockets every 10 milliseconds.
func (p *Plugin) LookOften() { p.every = 10 * time.Millisecond }

// NewHandler returns what answers a kubelet's calls, without sockets.
func NewHandler(claims Claims, health Health) kubeletplugin.DRAPlugin {
	return newHandler(Config{Claims: claims, Health: health}, &gate{}, nil)
}

// ReportConflict reports the result of a check for other drivers.
func (p *Plugin) ReportConflict(ctx context.Context, err error) { p.reportConflict(ctx, err) }

// Prepare prepares claims as in a call of the kubelet.
func Prepare(ctx context.Context, plugin kubeletplugin.DRAPlugin, claims ...*resourceapi.ResourceClaim) error {
	_, err := plugin.(*handler).gate.handle(ctx, &drapbv1.NodePrepareResourcesRequest{}, nil, func(ctx context.Context, _ any) (any, error) {
		return plugin.PrepareResourceClaims(ctx, claims)
	})
	return err
}
