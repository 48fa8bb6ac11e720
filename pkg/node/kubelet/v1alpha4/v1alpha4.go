// Package v1alpha4 serves kubelets of Kubernetes 1.31, which have version v1alpha4
// of the DRA gRPC API only, and name versions of plugins otherwise when these
// register.
//
// The messages of v1alpha4 are those of v1beta1, field by field. The package passes
// the calls to the plugin's own socket as calls of v1beta1.
//
// Nothing but pkg/node/kubelet, in one place, depends on it: delete it when support of
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
	"strings"
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
	// refusal is a part of the reason that only a kubelet of 1.31 has for refusing the
	// plugin's usual versions.
	refusal = "none of the versions are supported"
)

// Service serves v1alpha4 on a socket of its own once a kubelet of 1.31 has refused
// the plugin.
type Service struct {
	fail func(error)

	mu     sync.Mutex
	offers bool
	server *grpc.Server
	plugin *grpc.ClientConn
	socket string
	file   os.FileInfo // the socket as it was created
}

// New returns a Service that serves nothing yet. Pass Registration as an interceptor
// of the plugin's registration service, and call Stop at the end. fail is called if
// the Service can't go on.
func New(fail func(error)) *Service { return &Service{fail: fail} }

// Registration is a gRPC interceptor. After a kubelet of 1.31 has refused the plugin's
// usual versions, the plugin offers v1alpha4 at the kubelet's next attempt, some seconds
// later. After v1alpha4 is refused, it offers the usual versions again.
func (s *Service) Registration(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	resp, err := next(ctx, req)
	switch message := req.(type) {
	case *registerapi.RegistrationStatus:
		if !message.GetPluginRegistered() {
			s.refused(ctx, message.GetError())
		}
	case *registerapi.InfoRequest:
		if info, ok := resp.(*registerapi.PluginInfo); ok && err == nil {
			return s.offer(ctx, info)
		}
	}
	return resp, err
}

// Intact reports whether the socket, if there is one, still is the one that the
// Service serves.
func (s *Service) Intact() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server == nil {
		return true
	}
	now, err := os.Stat(s.socket)
	return err == nil && os.SameFile(s.file, now)
}

// Stop ends the service and removes its socket. Calls in progress are interrupted.
func (s *Service) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server != nil {
		s.server.Stop()
		_ = s.plugin.Close()
	}
}

func (s *Service) refused(ctx context.Context, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offers = !s.offers && strings.Contains(reason, refusal)
	klog.FromContext(ctx).Info("The kubelet refused the plugin", "reason", reason, "offeringV1alpha4Next", s.offers)
}

// offer returns what the kubelet is told of the plugin.
func (s *Service) offer(ctx context.Context, info *registerapi.PluginInfo) (*registerapi.PluginInfo, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.offers {
		return info, nil
	}
	socket := filepath.Join(filepath.Dir(info.GetEndpoint()), socketName)
	if s.server == nil {
		if err := s.serve(ctx, socket, info.GetEndpoint()); err != nil {
			s.offers = false // the kubelet may be a later one when it asks again
			return nil, err
		}
	}
	return &registerapi.PluginInfo{Type: info.GetType(), Name: info.GetName(), Endpoint: socket, SupportedVersions: []string{version}}, nil
}

// serve begins to serve v1alpha4 at a socket, and to pass the calls to the plugin's
// own socket.
func (s *Service) serve(ctx context.Context, socket, plugin string) error {
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
	file, err := os.Stat(socket)
	if err != nil {
		return errors.Join(fmt.Errorf("serve kubelets of Kubernetes 1.31: %w", err), listener.Close(), conn.Close())
	}
	server := grpc.NewServer()
	server.RegisterService(describe(), &proxy{plugin: drapb.NewDRAPluginClient(conn)})
	s.server, s.plugin, s.socket, s.file = server, conn, socket, file
	go func() {
		if err := server.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			s.fail(fmt.Errorf("serve kubelets of Kubernetes 1.31 at %s: %w", socket, err))
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
