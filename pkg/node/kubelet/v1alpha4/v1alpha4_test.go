package v1alpha4_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tessera-dra/tessera/pkg/node/kubelet/v1alpha4"
)

// plugin is the plugin's own service, of v1beta1.
type plugin struct {
	drapb.UnimplementedDRAPluginServer
}

func (plugin) NodePrepareResources(ctx context.Context, r *drapb.NodePrepareResourcesRequest) (*drapb.NodePrepareResourcesResponse, error) {
	if _, limited := ctx.Deadline(); !limited {
		return nil, status.Error(codes.Internal, "the kubelet's deadline is lost")
	}
	return &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{
		r.GetClaims()[0].GetUid(): {Devices: []*drapb.Device{{PoolName: "node-a", DeviceName: "gpu-0", RequestNames: []string{"gpu"}, CdiDeviceIds: []string{"a/b=c"}}}},
	}}, nil
}

func (plugin) NodeUnprepareResources(context.Context, *drapb.NodeUnprepareResourcesRequest) (*drapb.NodeUnprepareResourcesResponse, error) {
	return nil, status.Error(codes.Unavailable, "come again")
}

// fixture is a plugin's registration service.
type fixture struct {
	*v1alpha4.Service
	info *registerapi.PluginInfo
}

// start starts a plugin's own service.
func start(t *testing.T) *fixture {
	t.Helper()
	dir, err := os.MkdirTemp("", "v1alpha4") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "dra.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	drapb.RegisterDRAPluginServer(server, plugin{})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	s := v1alpha4.New()
	t.Cleanup(s.Stop)
	return &fixture{s, &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: "gpu.nvidia.com", Endpoint: socket,
		SupportedVersions: []string{"v1.DRAPlugin", "v1beta1.DRAPlugin"},
	}}
}

func (f *fixture) getInfo(t *testing.T) *registerapi.PluginInfo {
	t.Helper()
	info, err := f.Registration(t.Context(), &registerapi.InfoRequest{}, nil, func(context.Context, any) (any, error) { return f.info, nil })
	if err != nil {
		t.Fatal(err)
	}
	return info.(*registerapi.PluginInfo)
}

func (f *fixture) notify(t *testing.T, registered bool) {
	t.Helper()
	_, err := f.Registration(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: registered}, nil,
		func(context.Context, any) (any, error) { return &registerapi.RegistrationStatusResponse{}, nil })
	if err != nil {
		t.Fatal(err)
	}
}

func same(t *testing.T, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestRegistration checks that kubelets that accept the plugin get the same answer
// always, and those that don't the other one, also after an upgrade.
func TestRegistration(t *testing.T) {
	f := start(t)
	old := &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: "gpu.nvidia.com",
		Endpoint: filepath.Join(filepath.Dir(f.info.GetEndpoint()), "dra-v1alpha4.sock"), SupportedVersions: []string{"1.0.0"},
	}
	for _, step := range []struct {
		want     *registerapi.PluginInfo
		accepted bool
	}{{f.info, true}, {f.info, true}, {f.info, false}, {old, true}, {old, true}, {old, false}, {f.info, true}} {
		same(t, step.want, f.getInfo(t))
		f.notify(t, step.accepted)
	}
}

// TestCalls checks what the kubelet of Kubernetes 1.31 calls, by the names that it
// uses (k8s.io/kubelet v0.31.4, pkg/apis/dra/v1alpha4/api.pb.go).
func TestCalls(t *testing.T) {
	f := start(t)
	stale := filepath.Join(filepath.Dir(f.info.GetEndpoint()), "dra-v1alpha4.sock")
	if err := os.WriteFile(stale, nil, 0o600); err != nil { // of a plugin that was killed
		t.Fatal(err)
	}
	f.notify(t, false)
	conn, err := grpc.NewClient("unix://"+f.getInfo(t).GetEndpoint(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	calling, done := context.WithTimeout(t.Context(), time.Minute)
	defer done()
	var got drapb.NodePrepareResourcesResponse
	if err := conn.Invoke(calling, "/v1alpha3.Node/NodePrepareResources",
		&drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{{Uid: "u"}}}, &got); err != nil {
		t.Fatal(err)
	}
	same(t, &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{
		"u": {Devices: []*drapb.Device{{PoolName: "node-a", DeviceName: "gpu-0", RequestNames: []string{"gpu"}, CdiDeviceIds: []string{"a/b=c"}}}},
	}}, &got)
	err = conn.Invoke(calling, "/v1alpha3.Node/NodeUnprepareResources", &drapb.NodeUnprepareResourcesRequest{}, &drapb.NodeUnprepareResourcesResponse{})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("unprepare: %v", err)
	}
	f.Stop()
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}
