package kubelet_test

import (
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drahealthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/kubelet"
)

// health is that of one device, which a claim holds, as a test sets it.
type health struct {
	journal *journal.Journal
	facts   *facts.Facts
}

func newHealth(t *testing.T) health {
	t.Helper()
	return health{facts: facts.New("node-a"), journal: kubelet.JournalOf(t, holding.Record{
		ClaimUID: "training", Namespace: "default", Name: "training", Holdings: []holding.Holding{{Device: "gpu-0", GPU: "GPU-0"}},
	})}
}

// set has the GPU found with conditions.
func (h health) set(conditions ...gpu.Condition) {
	h.facts.Found(gpu.Node{Name: "node-a", GPUs: []gpu.GPU{{UUID: "GPU-0", Conditions: conditions}}})
}

func (h health) config() kubelet.Config {
	return kubelet.Config{Claims: &claims{}, Pool: "node-a", Journal: h.journal, Facts: h.facts}
}

// healthStream is a kubelet's end of a stream, of either version.
type healthStream interface {
	Recv() (*drahealthv1.NodeWatchResourcesResponse, error)
}

// TestHealth: kubelets of all versions are told the health when they ask and when it
// changes.
func TestHealth(t *testing.T) {
	for name, watch := range map[string]func(*testing.T, *grpc.ClientConn) (healthStream, error){
		"v1": func(t *testing.T, conn *grpc.ClientConn) (healthStream, error) {
			return drahealthv1.NewDRAResourceHealthClient(conn).NodeWatchResources(t.Context(), &drahealthv1.NodeWatchResourcesRequest{})
		},
		"v1alpha1": func(t *testing.T, conn *grpc.ClientConn) (healthStream, error) {
			c := drahealthv1.V1Alpha1ClientWrapper{Client: drahealthv1alpha1.NewDRAResourceHealthClient(conn)}
			return c.NodeWatchResources(t.Context(), &drahealthv1.NodeWatchResourcesRequest{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := run(t, kubeletRoot(t))
			f.health.set()
			stream, err := watch(t, dial(t, f.register(t).GetEndpoint()))
			if err != nil {
				t.Fatal(err)
			}
			await(t, stream, drahealthv1.HealthStatus_HEALTHY, "")
			f.health.set(gpu.Condition{Type: gpu.Lost, Message: "fell off the bus"})
			await(t, stream, drahealthv1.HealthStatus_UNHEALTHY, "Lost: fell off the bus")
			f.health.set(gpu.Condition{Type: gpu.NotResponding, Message: "hangs"})
			await(t, stream, drahealthv1.HealthStatus_UNKNOWN, "NotResponding: hangs")
		})
	}
}

// await receives until the kubelet is told so of the device.
func await(t *testing.T, stream healthStream, is drahealthv1.HealthStatus, message string) {
	t.Helper()
	for {
		resp, err := stream.Recv()
		if err != nil {
			t.Fatalf("waiting for %s: %v", is, err)
		}
		d := resp.GetDevices()[0]
		if d.GetDevice().GetPoolName() == "node-a" && d.GetDevice().GetDeviceName() == "gpu-0" && d.GetHealth() == is && d.GetMessage() == message {
			return
		}
	}
}

// TestHealthIsALease: a report counts for so short a time that, with the time for which
// the facts may go without a look at the hardware, the kubelet believes nothing for more
// than 30 seconds; and it comes again in time, also if one is lost.
func TestHealthIsALease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealth(t)
		h.set()
		reports := watchHealth(t, kubelet.NewHandler(h.config()))
		for range 10 {
			timeout := (<-reports).Devices[0].HealthCheckTimeout
			if timeout <= 0 || timeout+kubelet.HealthKnownWithin > 30*time.Second {
				t.Fatalf("a report counts for %s", timeout)
			}
			at := time.Now()
			<-reports
			if again := time.Since(at); 2*again > timeout {
				t.Fatalf("the next report comes after %s, each counts for %s", again, timeout)
			}
		}
	})
}

// TestHealthFollowsPrepare: when the kubelet has prepared a claim, it is told at once of
// the devices that have come with the claim.
func TestHealthFollowsPrepare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHealth(t)
		handler := kubelet.NewHandler(h.config())
		reports := watchHealth(t, handler)
		<-reports
		synctest.Wait()
		at := time.Now()
		if err := kubelet.Prepare(t.Context(), handler, newClaim("good")); err != nil {
			t.Fatal(err)
		}
		<-reports
		if waited := time.Since(at); waited > 0 {
			t.Errorf("the report came %s after the claim was prepared", waited)
		}
	})
}

// watchHealth watches until the test ends.
func watchHealth(t *testing.T, handler kubeletplugin.DRAPlugin) <-chan kubeletplugin.DeviceHealthReport {
	t.Helper()
	reports := make(chan kubeletplugin.DeviceHealthReport)
	go func() {
		if err := handler.WatchHealthStatus(t.Context(), reports); err != nil {
			t.Errorf("when the kubelet has gone: %v, want nil", err)
		}
	}()
	return reports
}
