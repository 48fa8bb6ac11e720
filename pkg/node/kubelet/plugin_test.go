package kubelet_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/testing/protocmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drahealthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

const driver = "gpu.nvidia.com"

// dataDirs has the data directory of plugins without a pod's UID, and of those with one.
var dataDirs = map[bool]string{true: "/var/lib/tessera"}

// claims is a fake of Claims: claims named "bad…" fail.
type claims struct {
	mu    sync.Mutex
	begun []types.UID
	// meet, if set, makes each prepare wait for the others, so that they must run
	// concurrently.
	meet *sync.WaitGroup
	// began, if set, gets a value for each prepare, which lasts until it is interrupted,
	// or, if ends is set too, until that is closed.
	began chan types.UID
	ends  chan struct{}
	// prepared and unprepared have the claims' UIDs, in order.
	prepared, unprepared []types.UID
}

func (c *claims) Begin(ctx context.Context, uids ...types.UID) (context.Context, func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begun = append(c.begun, uids...)
	return ctx, func() {}
}

func (c *claims) begunSoFar() []types.UID {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]types.UID(nil), c.begun...)
}

func (c *claims) Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	if c.began != nil {
		c.began <- claim.UID
		if c.ends != nil {
			<-c.ends
			return nil, errors.New("too late")
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	c.mu.Lock()
	c.prepared = append(c.prepared, claim.UID)
	c.mu.Unlock()
	if c.meet != nil {
		c.meet.Done()
		c.meet.Wait()
	}
	if strings.HasPrefix(claim.Name, "bad") {
		return nil, errors.New("no such GPU")
	}
	return []kubeletplugin.Device{{
		Requests: []string{"gpu/cheap"}, PoolName: "node-a", DeviceName: "gpu-0",
		CDIDeviceIDs: []string{"k8s.gpu.nvidia.com/claim=" + string(claim.UID) + "-gpu-0"},
		Metadata: &kubeletplugin.DeviceMetadata{Attributes: map[string]resourceapi.DeviceAttribute{
			"uuid": {StringValue: new("GPU-0")},
		}},
	}}, nil
}

func (c *claims) Unprepare(_ context.Context, claim kubeletplugin.NamespacedObject) error {
	c.mu.Lock()
	c.unprepared = append(c.unprepared, claim.UID)
	c.mu.Unlock()
	if strings.HasPrefix(claim.Name, "bad") {
		return errors.New("disk full")
	}
	return nil
}

// newClaim returns an allocated claim whose UID is its name.
func newClaim(name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
}

// kubeletRoot returns a kubelet's root directory whose path is short enough for
// sockets.
func kubeletRoot(t *testing.T) string {
	t.Helper()
	root, err := os.MkdirTemp("", "kubelet") //nolint:usetesting // t.TempDir has the test's name in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Mkdir(filepath.Join(root, "plugins_registry"), 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

// fixture is a plugin and the kubelet's ends of its sockets.
type fixture struct {
	root   string
	podUID types.UID
	plugin *kubelet.Plugin
	claims *claims
	client *fake.Clientset
	health health
	// ended receives the result of Run, once.
	ended chan error
	// stop ends Run and returns its result.
	stop func() error
}

// run runs a plugin until the test ends.
func run(t *testing.T, root string, names ...string) *fixture {
	t.Helper()
	return runAs(t, root, "", names...)
}

// runAs runs a plugin with the sockets of a pod.
func runAs(t *testing.T, root string, podUID types.UID, names ...string) *fixture {
	t.Helper()
	return runWith(t, kubelet.Config{Root: root, PodUID: podUID}, names...)
}

// runWith runs a plugin with some settings.
func runWith(t *testing.T, cfg kubelet.Config, names ...string) *fixture {
	t.Helper()
	var objects []runtime.Object
	for _, n := range names {
		objects = append(objects, newClaim(n))
	}
	f := &fixture{root: cfg.Root, podUID: cfg.PodUID, claims: &claims{}, client: fake.NewClientset(objects...), health: newHealth(t)}
	cfg.Driver, cfg.DataDir, cfg.Client, cfg.Claims = driver, dataDirs[cfg.PodUID != ""], f.client, f.claims
	cfg.Pool, cfg.Journal, cfg.Facts = "node-a", f.health.journal, f.health.facts
	plugin := kubelet.New(cfg)
	plugin.LookOften()
	f.plugin = plugin
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	f.ended = make(chan error, 1)
	go func() { f.ended <- plugin.Run(ctx) }()
	f.stop = sync.OnceValue(func() error {
		cancel()
		return <-f.ended
	})
	t.Cleanup(func() {
		if err := f.stop(); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return f
}

// awaitConflict waits until the plugin reports that another driver has its
// name, or that none has.
func (f *fixture) awaitConflict(t *testing.T, want bool) {
	t.Helper()
	for {
		state, changed := f.health.facts.State()
		if by := state.DRADriver; (by != "") == want && strings.Contains(by, "uninstall") == want {
			return
		}
		select {
		case <-changed:
		case err := <-f.ended:
			f.ended <- nil
			t.Fatalf("the plugin has ended before it said so: %v", err)
		}
	}
}

// dial connects to a socket, which may be created later.
func dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func (f *fixture) registration(t *testing.T) registerapi.RegistrationClient {
	registry, name := filepath.Join(f.root, "plugins_registry"), driver+"-reg.sock"
	if f.podUID != "" {
		name = kubeletplugin.RollingUpdateRegistrarSocketFile(registry, driver, f.podUID)
	}
	return registerapi.NewRegistrationClient(dial(t, filepath.Join(registry, name)))
}

// register registers the plugin as a kubelet does, and returns the plugin's
// data.
func (f *fixture) register(t *testing.T) *registerapi.PluginInfo {
	t.Helper()
	c := f.registration(t)
	info, err := c.GetInfo(t.Context(), &registerapi.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	return info
}

func TestRegistration(t *testing.T) {
	f := run(t, kubeletRoot(t))
	info := f.register(t)
	want := &registerapi.PluginInfo{
		Type: registerapi.DRAPlugin, Name: driver,
		Endpoint: filepath.Join(kubelet.DataDirectory(f.root, driver), "dra.sock"),
		SupportedVersions: []string{
			drapbv1.DRAPluginService, drapbv1beta1.DRAPluginService,
			drahealthv1.DRAResourceHealthService, drahealthv1alpha1.DRAResourceHealthService,
		},
	}
	if diff := cmp.Diff(want, info, protocmp.Transform()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	first, _ := f.health.facts.State()
	f.register(t) // as after a restart of the kubelet
	second, _ := f.health.facts.State()
	if first.Registered.IsZero() || !second.Registered.After(first.Registered) {
		t.Errorf("registered at %s, and again at %s", first.Registered, second.Registered)
	}
	_, err := f.registration(t).NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{Error: "no"})
	if err == nil {
		t.Error("a failed registration went unnoticed")
	}
	if third, _ := f.health.facts.State(); third.Registered != second.Registered {
		t.Error("a failed registration counts")
	}
}

func TestPrepareAndUnprepare(t *testing.T) {
	f := run(t, kubeletRoot(t), "good", "bad", "better")
	conn := dial(t, f.register(t).GetEndpoint())
	var request []*drapbv1.Claim
	for _, n := range []string{"good", "bad", "better"} {
		request = append(request, &drapbv1.Claim{Namespace: "default", Name: n, Uid: n})
	}
	prepared := func(name string) *drapbv1.NodePrepareResourceResponse {
		return &drapbv1.NodePrepareResourceResponse{Devices: []*drapbv1.Device{{
			RequestNames: []string{"gpu"}, PoolName: "node-a", DeviceName: "gpu-0",
			CdiDeviceIds: []string{"k8s.gpu.nvidia.com/claim=" + name + "-gpu-0"},
		}}}
	}
	f.claims.meet = &sync.WaitGroup{}
	f.claims.meet.Add(len(request))
	got, err := drapbv1.NewDRAPluginClient(conn).NodePrepareResources(t.Context(), &drapbv1.NodePrepareResourcesRequest{Claims: request})
	if err != nil {
		t.Fatal(err)
	}
	want := &drapbv1.NodePrepareResourcesResponse{Claims: map[string]*drapbv1.NodePrepareResourceResponse{
		"good": prepared("good"), "better": prepared("better"), "bad": {Error: "no such GPU"},
	}}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("prepare (-want +got):\n%s", diff)
	}
	gone, err := drapbv1.NewDRAPluginClient(conn).NodeUnprepareResources(t.Context(), &drapbv1.NodeUnprepareResourcesRequest{Claims: request})
	if err != nil {
		t.Fatal(err)
	}
	wantGone := &drapbv1.NodeUnprepareResourcesResponse{Claims: map[string]*drapbv1.NodeUnprepareResourceResponse{
		"good": {}, "better": {}, "bad": {Error: "disk full"},
	}}
	if diff := cmp.Diff(wantGone, gone, protocmp.Transform()); diff != "" {
		t.Errorf("unprepare (-want +got):\n%s", diff)
	}
}

func TestV1beta1(t *testing.T) {
	f := run(t, kubeletRoot(t), "good")
	c := drapbv1beta1.NewDRAPluginClient(dial(t, f.register(t).GetEndpoint()))
	request := []*drapbv1beta1.Claim{{Namespace: "default", Name: "good", Uid: "good"}}
	got, err := c.NodePrepareResources(t.Context(), &drapbv1beta1.NodePrepareResourcesRequest{Claims: request})
	if err != nil {
		t.Fatal(err)
	}
	if d := got.GetClaims()["good"].GetDevices(); len(d) != 1 || d[0].GetDeviceName() != "gpu-0" {
		t.Errorf("prepare: got %v", got)
	}
	if diff := cmp.Diff([]types.UID{"good"}, f.claims.begunSoFar()); diff != "" {
		t.Errorf("begun (-want +got):\n%s", diff)
	}
	if _, err := c.NodeUnprepareResources(t.Context(), &drapbv1beta1.NodeUnprepareResourcesRequest{Claims: request}); err != nil {
		t.Errorf("unprepare: %v", err)
	}
}

func TestPrepareIsAnnouncedBeforeTheClaimIsRead(t *testing.T) {
	f := run(t, kubeletRoot(t), "good")
	c := drapbv1.NewDRAPluginClient(dial(t, f.register(t).GetEndpoint()))
	f.client.PrependReactor("get", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, fmt.Errorf("begun: %v", f.claims.begunSoFar())
	})
	_, err := c.NodePrepareResources(t.Context(), &drapbv1.NodePrepareResourcesRequest{Claims: []*drapbv1.Claim{{Namespace: "default", Name: "good", Uid: "good"}}})
	if err == nil || !strings.Contains(err.Error(), "begun: [good]") {
		t.Errorf("got %v, want the claim begun when it is read", err)
	}
}

func TestRunRefuses(t *testing.T) {
	start := func(t *testing.T, root string) error {
		_, ctx := ktesting.NewTestContext(t)
		return kubelet.New(kubelet.Config{Driver: driver, Root: root, Client: fake.NewClientset(), Claims: &claims{}, Facts: facts.New("node-a")}).Run(ctx)
	}
	t.Run("a path too long for a socket", func(t *testing.T) {
		err := start(t, filepath.Join(t.TempDir(), strings.Repeat("x", 100)))
		if err == nil || !strings.Contains(err.Error(), "shorter") {
			t.Errorf("got %v, want a refusal that says how much shorter", err)
		}
	})
	t.Run("not the kubelet's directory", func(t *testing.T) {
		root := kubeletRoot(t)
		err := start(t, filepath.Join(root, "nowhere"))
		if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "--root-dir") {
			t.Errorf("got %v, want a refusal that names the option", err)
		}
	})
}

// TestAnotherDriverWasFirst checks that the plugin doesn't touch the other
// driver's sockets, reports why, and registers when the other one is gone.
func TestAnotherDriverWasFirst(t *testing.T) {
	other := run(t, kubeletRoot(t))
	other.register(t)
	f := run(t, other.root)
	f.awaitConflict(t, true)
	other.register(t)
	if err := other.stop(); err != nil {
		t.Fatal(err)
	}
	f.awaitConflict(t, false)
	answered := make(chan error, 1)
	c := f.registration(t)
	go func() {
		_, err := c.GetInfo(t.Context(), &registerapi.InfoRequest{})
		answered <- err
	}()
	select {
	case err := <-answered:
		if err != nil {
			t.Fatal(err)
		}
	case err := <-f.ended: // the other driver removed its sockets so late that they were the plugin's
		if err == nil || !strings.Contains(err.Error(), "must be restarted") {
			t.Fatalf("got %v, want an end that says why", err)
		}
		f.ended <- nil
		f = run(t, f.root)
	}
	f.register(t)
}

// TestAnotherDriverTakesTheSockets checks that the plugin reports the other
// driver while it runs, and ends when that is gone, because the kubelet can't
// reach the plugin any more.
func TestAnotherDriverTakesTheSockets(t *testing.T) {
	f := run(t, kubeletRoot(t))
	f.register(t)
	l, err := net.Listen("unix", filepath.Join(f.root, "other.sock"))
	if err != nil {
		t.Fatal(err)
	}
	other := grpc.NewServer()
	registerapi.RegisterRegistrationServer(other, impostor{})
	go func() { _ = other.Serve(l) }()
	defer other.Stop()
	// In one step: the plugin ends when it finds its socket gone and nobody answering there.
	if err := os.Rename(l.Addr().String(), filepath.Join(f.root, "plugins_registry", driver+"-reg.sock")); err != nil {
		t.Fatal(err)
	}
	f.awaitConflict(t, true)
	other.Stop()
	err = <-f.ended
	if err == nil || !strings.Contains(err.Error(), "must be restarted") {
		t.Errorf("got %v, want an end that says why", err)
	}
	f.ended <- nil
}

// TestSocketForOldKubeletsIsWatched checks that the plugin ends when a kubelet of 1.31
// can't reach it any more.
func TestSocketForOldKubeletsIsWatched(t *testing.T) {
	f := run(t, kubeletRoot(t))
	c := f.registration(t)
	if _, err := c.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{Error: "none of the versions are supported"}); err == nil {
		t.Fatal("the plugin doesn't mind that it is refused")
	}
	info := f.register(t)
	if err := os.Remove(info.GetEndpoint()); err != nil || !strings.Contains(info.GetEndpoint(), "v1alpha4") {
		t.Fatalf("remove the socket %s: %v", info.GetEndpoint(), err)
	}
	if err := <-f.ended; err == nil || !strings.Contains(err.Error(), "must be restarted") {
		t.Errorf("got %v, want an end that says why", err)
	}
	f.ended <- nil
}

// impostor is another driver of the same name.
type impostor struct {
	registerapi.UnsafeRegistrationServer
}

func (impostor) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: registerapi.DRAPlugin, Name: driver, Endpoint: "/elsewhere"}, nil
}

func (impostor) NotifyRegistrationStatus(context.Context, *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	return &registerapi.RegistrationStatusResponse{}, nil
}
