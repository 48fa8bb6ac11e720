package kubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// handler implements kubeletplugin.DRAPlugin.
type handler struct {
	cfg Config
	// gate has the calls in which the handler is called.
	gate *gate
	// fail ends Run with an error.
	fail context.CancelCauseFunc
}

// PrepareResourceClaims prepares the claims concurrently.
func (h *handler) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make([]kubeletplugin.PrepareResult, len(claims))
	var calls sync.WaitGroup
	for i, c := range claims {
		calls.Go(func() { results[i] = h.prepare(ctx, c) })
	}
	calls.Wait()
	byUID := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for i, c := range claims {
		byUID[c.UID] = results[i]
	}
	return byUID, nil
}

func (h *handler) prepare(ctx context.Context, c *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KObj(c), "claimUID", c.UID)
	start := time.Now()
	devices, err := h.cfg.Claims.Prepare(klog.NewContext(ctx, logger), c)
	if err != nil {
		logger.Error(err, "Preparing a claim failed", "duration", time.Since(start))
		return kubeletplugin.PrepareResult{Err: err}
	}
	logger.V(2).Info("Prepared a claim", "devices", names(devices), "duration", time.Since(start))
	return kubeletplugin.PrepareResult{Devices: devices}
}

// UnprepareResourceClaims unprepares the claims concurrently.
func (h *handler) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	errs := make([]error, len(claims))
	var calls sync.WaitGroup
	for i, c := range claims {
		calls.Go(func() { errs[i] = h.unprepare(ctx, c) })
	}
	calls.Wait()
	byUID := make(map[types.UID]error, len(claims))
	for i, c := range claims {
		byUID[c.UID] = errs[i]
	}
	return byUID, nil
}

func (h *handler) unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claim", klog.KRef(c.Namespace, c.Name), "claimUID", c.UID)
	start := time.Now()
	if err := h.cfg.Claims.Unprepare(klog.NewContext(ctx, logger), c); err != nil {
		logger.Error(err, "Unpreparing a claim failed", "duration", time.Since(start))
		return err
	}
	logger.V(2).Info("Unprepared a claim", "duration", time.Since(start))
	return nil
}

// HandleError ends Run if the helper can't continue after the error.
func (h *handler) HandleError(ctx context.Context, err error, msg string) {
	runtime.HandleErrorWithContext(ctx, err, msg)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		h.fail(fmt.Errorf("%s: %w", msg, err))
	}
}

// announce registers a prepare (Preparer.Begin) before the helper reads its claims, so that an
// unprepare that comes meanwhile stops it. It is a gRPC interceptor.
func (p *Plugin) announce(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	c := readCall(req)
	if c.answer == nil || c.unprepare {
		return next(ctx, req)
	}
	ctx, done := p.cfg.Claims.Begin(ctx, slices.Collect(maps.Keys(c.claims))...)
	defer done()
	return next(ctx, req)
}

// ofRegistration returns an interceptor that only calls of the kubelet's registration
// service pass: the plugin's own service has the same list of interceptors.
func ofRegistration(interceptor grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		switch req.(type) {
		case *registerapi.InfoRequest, *registerapi.RegistrationStatus:
			return interceptor(ctx, req, info, next)
		default:
			return next(ctx, req)
		}
	}
}

// after returns a gRPC interceptor with which calls wait until the channel is closed. Who
// has registered the plugin may count on its watching its sockets: another driver's, which
// replace them, are never taken for the plugin's own.
func after(closed <-chan struct{}) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		select {
		case <-closed:
			return next(ctx, req)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// noteRegistration is a gRPC interceptor that handles the kubelet's notice
// about the plugin's registration.
func (p *Plugin) noteRegistration(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	resp, err := next(ctx, req)
	if status, ok := req.(*registerapi.RegistrationStatus); ok && err == nil && status.GetPluginRegistered() {
		klog.FromContext(ctx).Info("Registered with the kubelet", "node", p.cfg.Pool)
		p.cfg.Facts.SetRegistered()
	}
	return resp, err
}

func names(devices []kubeletplugin.Device) []string {
	list := make([]string, 0, len(devices))
	for _, d := range devices {
		list = append(list, d.DeviceName)
	}
	return list
}
