package node

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

// serveKubelet runs a kubelet.Plugin until the test ends, and returns the kubelet's
// end of its socket.
func serveKubelet(t *testing.T, claims kubelet.Claims, known ...*resourceapi.ResourceClaim) (*kubelet.Plugin, drapbv1.DRAPluginClient) {
	t.Helper()
	root, err := os.MkdirTemp("", "kubelet") //nolint:usetesting // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if err := os.Mkdir(filepath.Join(root, "plugins_registry"), 0o755); err != nil {
		t.Fatal(err)
	}
	var objects []runtime.Object
	for _, c := range known {
		objects = append(objects, c)
	}
	j, err := journal.Open(filepath.Join(root, "journal"), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	p := kubelet.New(kubelet.Config{
		Driver: gpu.DriverName, Root: root, Client: fake.NewClientset(objects...), Claims: claims, Journal: j, Facts: facts.New("node-a"),
	})
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	conn, err := grpc.NewClient("unix://"+filepath.Join(kubelet.DataDirectory(root, gpu.DriverName), "dra.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return p, drapbv1.NewDRAPluginClient(conn)
}

func prepareRequest(c *resourceapi.ResourceClaim) *drapbv1.NodePrepareResourcesRequest {
	return &drapbv1.NodePrepareResourcesRequest{Claims: []*drapbv1.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}}
}

// blocked are claims whose prepares last until unblocked is closed.
type blocked struct {
	prepares  chan struct{} // one for each that has begun
	unblocked chan struct{}
}

func (b blocked) Begin(ctx context.Context, _ ...types.UID) (context.Context, func()) {
	return ctx, func() {}
}

func (b blocked) Prepare(context.Context, *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	b.prepares <- struct{}{}
	<-b.unblocked
	return nil, nil
}

func (b blocked) Unprepare(context.Context, kubeletplugin.NamespacedObject) error { return nil }

// TestStuckCall checks that a probe notices a call of the kubelet that doesn't end.
func TestStuckCall(t *testing.T) {
	b := blocked{prepares: make(chan struct{}), unblocked: make(chan struct{})}
	plug, client := serveKubelet(t, b, claimOf("training"))
	p := &plugin{driver: driver.New(driver.Config{}), kubelet: plug}
	answered := make(chan error, 1)
	go func() {
		_, err := client.NodePrepareResources(t.Context(), prepareRequest(claimOf("training")))
		answered <- err
	}()
	<-b.prepares
	if err := p.stuck(0); err == nil || !strings.Contains(err.Error(), "a call of the kubelet") {
		t.Errorf("while a call is under way: %v, want an error that names it", err)
	}
	if err := p.healthy(); err != nil {
		t.Errorf("while a call has not lasted for %s: %v", stuckAfter, err)
	}
	close(b.unblocked)
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	if err := p.stuck(0); err != nil {
		t.Errorf("after the call: %v", err)
	}
}
