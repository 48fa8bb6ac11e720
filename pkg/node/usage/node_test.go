package usage

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// away is a kubelet that doesn't answer.
type away struct {
	podresources.PodResourcesListerClient
}

func (away) List(context.Context, *podresources.ListPodResourcesRequest, ...grpc.CallOption) (*podresources.ListPodResourcesResponse, error) {
	return nil, errors.New("the kubelet is away")
}

// TestScrapeOfANode reads a node's records: partitions in those of another boot are gone, a
// GPU that is listed twice counts once, and a kubelet that is away hides only containers.
func TestScrapeOfANode(t *testing.T) {
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for i, of := range []struct {
		uuid gpu.UUID
		boot string
	}{{divided, "boot-2"}, {shared, "boot-1"}} {
		h := holding.New(gpu.DeviceName("gpu-"+of.uuid[4:12]+"-mig-1g-10gb-2-1"), partition(of.uuid, "1g.10gb", 2, 1))
		made := holding.MadePartition{Partition: h.Partition, Made: &holding.MadeInstance{GPUInstanceID: 9, UUID: "MIG-1"}}
		name := string(rune('a' + i))
		err := errors.Join(
			j.Put(holding.Record{ClaimUID: name, Namespace: "team", Name: name, BootID: of.boot, Holdings: []holding.Holding{h}, Pods: []holding.Pod{{UID: "1", Name: "pod"}}}),
			j.PutGPU(holding.GPURecord{GPU: of.uuid, BootID: of.boot, Partitions: []holding.MadePartition{made}}))
		if err != nil {
			t.Fatal(err)
		}
	}
	known := facts.New("node-0")
	known.Found(gpu.Node{Name: "node-0", GPUs: []gpu.GPU{{UUID: divided}, {UUID: divided}}})
	in, err := containers.New(t.TempDir(), driverroot.NewHost(t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	c := New(Config{
		NodeName: "node-0", BootID: "boot-2", Journal: j, Facts: known, Containers: in,
		Kubelet: NewPodResources(away{}, gpu.DriverName), Readings: NewReadings(known, in, false),
	})
	const want = `
# HELP tessera_allocation_info 1 for each device that a claim has and each container that uses it. uuid: of the GPU or MIG device; parent_uuid: of the GPU; container is empty where the kubelet doesn't say which containers use the claim.
# TYPE tessera_allocation_info gauge
tessera_allocation_info{claim="a",container="",device="gpu-11111111-mig-1g-10gb-2-1",gpu_instance_id="9",namespace="team",node="node-0",parent_uuid="GPU-11111111-0000-0000-0000-000000000000",pod="pod",profile="1g.10gb",share_id="",type="mig",uuid="MIG-1"} 1
tessera_allocation_info{claim="b",container="",device="gpu-22222222-mig-1g-10gb-2-1",gpu_instance_id="",namespace="team",node="node-0",parent_uuid="GPU-22222222-0000-0000-0000-000000000000",pod="pod",profile="1g.10gb",share_id="",type="mig",uuid=""} 1
# HELP tessera_gpu_health 1 for each condition that the GPU has; condition is Healthy for a GPU that has none.
# TYPE tessera_gpu_health gauge
tessera_gpu_health{condition="Healthy",uuid="GPU-11111111-0000-0000-0000-000000000000"} 1
# HELP tessera_pod_resources_readable Whether the kubelet's PodResources API answered. If not, tessera_allocation_info has the pods that claims were prepared for, and no containers.
# TYPE tessera_pod_resources_readable gauge
tessera_pod_resources_readable 0
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), "tessera_allocation_info", "tessera_gpu_health", "tessera_pod_resources_readable"); err != nil {
		t.Error(err)
	}
}
