// Package v1alpha4 serves kubelets of Kubernetes 1.31, which have version v1alpha4
// of the DRA gRPC API only, and name versions of plugins otherwise when these
// register.
//
// The messages of v1alpha4 are those of v1beta1, field by field. The package passes
// the calls to the plugin's own socket as calls of v1beta1.
//
// Nothing but one line in pkg/node/kubelet depends on it: delete it when support of
// Kubernetes 1.31 ends.
package v1alpha4

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	// service is the name of the gRPC service of v1alpha4.
	service = "v1alpha3.Node"
	// version is the only one that a kubelet of 1.31 may be told: it accepts versions
	// 1.x, and calls v1alpha4 whatever they are.
	version = "1.0.0"
	// socketName is beside the plugin's own socket.
	socketName = "dra-v1alpha4.sock"
)

// Registration returns an interceptor of the plugin's registration service. If the
// kubelet refuses the plugin because it supports none of the versions, the plugin
// offers v1alpha4 at the kubelet's next attempt, at an endpoint that is then served
// until ctx ends; if the kubelet refuses that, because it was upgraded since, the
// plugin offers again what it did before. Kubelets try again within seconds.
func Registration(ctx context.Context) grpc.UnaryServerInterceptor {
	r := &registration{ctx: ctx}
	return r.intercept
}

type registration struct {
	ctx context.Context //nolint:containedctx // that of the server, which begins later

	mu     sync.Mutex
	offers bool
	serves bool
}

func (r *registration) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	resp, err := next(ctx, req)
	switch message := req.(type) {
	case *registerapi.RegistrationStatus:
		if !message.GetPluginRegistered() {
			r.refused(ctx, message.GetError())
		}
	case *registerapi.InfoRequest:
		if info, ok := resp.(*registerapi.PluginInfo); ok && err == nil {
			return r.offer(info)
		}
	}
	return resp, err
}

func (r *registration) refused(ctx context.Context, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.offers = !r.offers
	klog.FromContext(ctx).Info("The kubelet refused the plugin", "reason", reason, "offeringV1alpha4Next", r.offers)
}

// offer returns what the kubelet is told of the plugin.
func (r *registration) offer(info *registerapi.PluginInfo) (*registerapi.PluginInfo, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.offers {
		return info, nil
	}
	socket := filepath.Join(filepath.Dir(info.GetEndpoint()), socketName)
	if !r.serves {
		if err := serve(r.ctx, socket, info.GetEndpoint()); err != nil {
			return nil, err
		}
		r.serves = true
	}
	return &registerapi.PluginInfo{Type: info.GetType(), Name: info.GetName(), Endpoint: socket, SupportedVersions: []string{version}}, nil
}

// serve serves v1alpha4 at a socket until ctx ends, and passes the calls to the
// plugin's own socket.
func serve(ctx context.Context, socket, plugin string) error {
	conn, err := grpc.NewClient("unix://"+plugin, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to the plugin's socket %s: %w", plugin, err)
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return errors.Join(fmt.Errorf("remove the socket of a plugin that was killed: %w", err), conn.Close())
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return errors.Join(fmt.Errorf("serve kubelets of Kubernetes 1.31: %w", err), conn.Close())
	}
	server := grpc.NewServer()
	server.RegisterService(describe(), &proxy{plugin: drapb.NewDRAPluginClient(conn)})
	context.AfterFunc(ctx, server.Stop)
	go func() {
		err := errors.Join(server.Serve(listener), conn.Close())
		if ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Serving kubelets of Kubernetes 1.31 ended", "socket", socket)
		}
	}()
	return nil
}

// describe returns v1beta1's service under the name of v1alpha4's.
func describe() *grpc.ServiceDesc {
	d := drapb.DRAPlugin_ServiceDesc
	d.ServiceName, d.Methods = service, slices.Clone(d.Methods)
	return &d
}

type proxy struct {
	drapb.UnsafeDRAPluginServer
	plugin drapb.DRAPluginClient
}

func (p *proxy) NodePrepareResources(ctx context.Context, r *drapb.NodePrepareResourcesRequest) (*drapb.NodePrepareResourcesResponse, error) {
	return p.plugin.NodePrepareResources(ctx, r)
}

func (p *proxy) NodeUnprepareResources(ctx context.Context, r *drapb.NodeUnprepareResourcesRequest) (*drapb.NodeUnprepareResourcesResponse, error) {
	return p.plugin.NodeUnprepareResources(ctx, r)
}
