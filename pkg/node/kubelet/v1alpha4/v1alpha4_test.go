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
	s := v1alpha4.New(func(err error) { t.Errorf("the plugin is ended: %v", err) })
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

// refusedBy131 is how a kubelet of 1.31.4 refuses the plugin.
const refusedBy131 = "RegisterPlugin error -- plugin validation failed with err: invalid versions of plugin gpu.nvidia.com: " +
	"none of the versions are supported: could not find a highest supported version from versions ([v1.DRAPlugin v1beta1.DRAPlugin]) " +
	"reported: illegal version string \"v1.DRAPlugin\""

// notify answers the plugin as a kubelet does; an empty reason accepts it.
func (f *fixture) notify(t *testing.T, reason string) {
	t.Helper()
	_, err := f.Registration(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: reason == "", Error: reason}, nil,
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

// TestRegistration checks that only a kubelet of 1.31 is offered v1alpha4, until a
// later one refuses that after an upgrade.
func TestRegistration(t *testing.T) {
	f := start(t)
	old := &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: "gpu.nvidia.com",
		Endpoint: filepath.Join(filepath.Dir(f.info.GetEndpoint()), "dra-v1alpha4.sock"), SupportedVersions: []string{"1.0.0"},
	}
	for _, step := range []struct {
		want   *registerapi.PluginInfo
		reason string
	}{
		{f.info, ""},
		{f.info, "RegisterPlugin error -- plugin registration failed with err: the Node isn't there yet"},
		{f.info, refusedBy131},
		{old, ""},
		{old, ""},
		{old, `none of services supported by the plugin (["1.0.0"]) are supported by the kubelet (["v1.DRAPlugin" "v1beta1.DRAPlugin"])`},
		{f.info, ""},
	} {
		same(t, step.want, f.getInfo(t))
		f.notify(t, step.reason)
	}
}

// TestSocketFails checks that a kubelet that is upgraded in the meantime is served.
func TestSocketFails(t *testing.T) {
	f := start(t)
	inTheWay := filepath.Join(filepath.Dir(f.info.GetEndpoint()), "dra-v1alpha4.sock", "file")
	if err := os.MkdirAll(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	f.notify(t, refusedBy131)
	_, err := f.Registration(t.Context(), &registerapi.InfoRequest{}, nil, func(context.Context, any) (any, error) { return f.info, nil })
	if err == nil {
		t.Fatal("no error")
	}
	same(t, f.info, f.getInfo(t))
}

// TestCalls checks what the kubelet of Kubernetes 1.31 calls, by the names that it
// uses (k8s.io/kubelet v0.31.4, pkg/apis/dra/v1alpha4/api.pb.go).
func TestCalls(t *testing.T) {
	f := start(t)
	stale := filepath.Join(filepath.Dir(f.info.GetEndpoint()), "dra-v1alpha4.sock")
	if err := os.WriteFile(stale, nil, 0o600); err != nil { // of a plugin that was killed
		t.Fatal(err)
	}
	f.notify(t, refusedBy131)
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
	if !f.Intact() {
		t.Error("the socket is taken for somebody else's")
	}
	f.Stop()
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}
