package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/containers"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/usage"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

const (
	// scrapes are measured for each node.
	scrapes = 50
	// sharesEach is how many MPS shares each GPU has.
	sharesEach = 48
)

// scrapedNode is a node of eight H100s on paper: the plugin's own code answers a scrape, the
// driver and the kubelet answer at once.
type scrapedNode struct {
	podresources.PodResourcesListerClient

	gpus   []gpu.GPU
	claims []holding.Record
	made   map[gpu.UUID][]holding.MadePartition
	pods   []*podresources.PodResources
	usages map[gpu.UUID]gpu.Usage
}

// metrics measures how long the plugin takes to answer a scrape, and how much memory its
// readings of the GPUs take.
func (b *bench) metrics(context.Context) error {
	shared, err := newScrapedNode()
	if err != nil {
		return err
	}
	for _, g := range shared.gpus {
		for n := range sharesEach {
			shared.share(g, n)
		}
	}
	divided, err := newScrapedNode()
	if err != nil {
		return err
	}
	for _, g := range divided.gpus {
		for n := range migEach {
			divided.partition(g, n)
		}
	}
	before := heap()
	for name, n := range map[string]*scrapedNode{"metrics_scrape_ms": shared, "metrics_scrape_56_partitions_ms": divided} {
		took, readings, err := n.scrape()
		if err != nil {
			return err
		}
		b.figure(name, took.percentile(50))
		if n == shared {
			b.figure("metrics_memory_mib", max(0, heap()-before))
		}
		runtime.KeepAlive(readings)
	}
	return nil
}

// heap returns the memory of live objects in MiB.
func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / (1 << 20)
}

func newScrapedNode() (*scrapedNode, error) {
	n, err := offertest.Node("h100-80gb", migGPUs)
	if err != nil {
		return nil, fmt.Errorf("simulate a node: %w", err)
	}
	return &scrapedNode{gpus: n.GPUs, made: map[gpu.UUID][]holding.MadePartition{}, usages: map[gpu.UUID]gpu.Usage{}}, nil
}

// claim adds a claim with a device, and the process of its container.
func (n *scrapedNode) claim(h holding.Holding, p gpu.Process) {
	name := fmt.Sprintf("%08d-0000-0000-0000-000000000000", len(n.claims)) // as a UID is written
	n.claims = append(n.claims, holding.Record{
		ClaimUID: name, Namespace: "team", Name: name, BootID: "boot", Holdings: []holding.Holding{h}, Pods: []holding.Pod{{UID: name, Name: name}},
	})
	n.pods = append(n.pods, &podresources.PodResources{Name: name, Namespace: "team", Containers: []*podresources.ContainerResources{{
		Name: "main", DynamicResources: []*podresources.DynamicResource{{
			ClaimNamespace: "team", ClaimName: name, ClaimResources: []*podresources.ClaimResource{{DriverName: gpu.DriverName}},
		}},
	}}})
	u := n.usages[h.GPU]
	u.Memory, u.Utilization = gpu.MemoryUsage{Total: 80 << 30, Used: 40 << 30}, new(0.5)
	p.PID, p.MemoryBytes = len(n.claims), new(int64(1<<30))
	u.Processes = append(u.Processes, p)
	n.usages[h.GPU] = u
}

func (n *scrapedNode) share(g gpu.GPU, number int) {
	h := holding.New(gpu.DeviceName(fmt.Sprintf("gpu-%s-mps%d-%d", g.UUID[4:12], sharesEach, number)),
		gpu.Share{Of: gpu.Whole{GPU: g.UUID}, Count: sharesEach, Number: number})
	h.MPS = &holding.MPS{ThreadPercentage: 2, MemoryMiB: 1600}
	n.claim(h, gpu.Process{Utilization: new(0.01), MPSClient: true})
}

func (n *scrapedNode) partition(g gpu.GPU, number int) {
	p := gpu.Partition{GPU: g.UUID, Profile: migProfile, Placement: gpu.Placement{Start: number, Size: 1}}
	h := holding.New(gpu.DeviceName(fmt.Sprintf("gpu-%s-mig-1g10gb-%d", g.UUID[4:12], number)), p)
	id, compute := 7+number, 0
	uuid := gpu.UUID(fmt.Sprintf("MIG-%s-%d", g.UUID, number))
	n.made[g.UUID] = append(n.made[g.UUID], holding.MadePartition{Partition: h.Partition, Made: &holding.MadeInstance{GPUInstanceID: id, UUID: uuid}})
	n.claim(h, gpu.Process{GPUInstanceID: &id, ComputeInstanceID: &compute})
	u := n.usages[g.UUID]
	u.Utilization = nil
	u.Partitions = append(u.Partitions, gpu.PartitionUsage{UUID: uuid, GPUInstanceID: id, Memory: gpu.MemoryUsage{Total: 10 << 30, Used: 1 << 30}, Utilization: new(0.5)})
	n.usages[g.UUID] = u
}

// List implements podresources.PodResourcesListerClient.
func (n *scrapedNode) List(context.Context, *podresources.ListPodResourcesRequest, ...grpc.CallOption) (*podresources.ListPodResourcesResponse, error) {
	return &podresources.ListPodResourcesResponse{PodResources: n.pods}, nil
}

// write writes the plugin's files of the node to a directory: its journal, and the host's
// files of the claims' processes.
func (n *scrapedNode) write(dir string) (*journal.Journal, *containers.Containers, error) {
	host := filepath.Join(dir, "host")
	in, err := containers.New(filepath.Join(dir, "marks"), driverroot.NewHost(host))
	if err != nil {
		return nil, nil, err
	}
	j, err := journal.Open(filepath.Join(dir, "claims"), nil)
	if err != nil {
		return nil, nil, err
	}
	for i, c := range n.claims {
		proc := filepath.Join(host, "proc", strconv.Itoa(i+1))
		err = errors.Join(err, j.Put(c), os.MkdirAll(proc, 0o755),
			os.WriteFile(filepath.Join(proc, "cgroup"), []byte("0::/kubepods/pod"+c.ClaimUID+"/container\n"), 0o600),
			os.WriteFile(filepath.Join(proc, "mountinfo"), []byte("901 880 8:1 /marks/"+c.ClaimUID+" "+containers.MountDir+"/"+c.ClaimUID+" ro - ext4 /dev/vda rw\n"+
				"902 880 8:1 /pods/"+c.ClaimUID+"/containers/main/a /dev/termination-log rw - ext4 /dev/vda rw\n"), 0o600))
	}
	for uuid, made := range n.made {
		err = errors.Join(err, j.PutGPU(holding.GPURecord{GPU: uuid, BootID: "boot", Partitions: made}))
	}
	return j, in, err
}

// scrape measures answers, all of which must have a series of each container.
func (n *scrapedNode) scrape() (sample, *usage.Readings, error) {
	dir, err := os.MkdirTemp("", "scrape")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir)
	j, in, err := n.write(dir)
	if err != nil {
		return nil, nil, err
	}
	defer j.Close()
	known := facts.New("node-0")
	known.Found(gpu.Node{Name: "node-0", GPUs: n.gpus})
	readings := usage.NewReadings(known, in, true)
	registry := prometheus.NewRegistry()
	registry.MustRegister(usage.New(usage.Config{
		NodeName: "node-0", BootID: "boot", Journal: j, Facts: known, Containers: in, Readings: readings,
		Kubelet: usage.NewPodResources(n, gpu.DriverName),
	}))
	if _, err := n.answer(registry); err != nil { // the first one asks for readings
		return nil, nil, err
	}
	for uuid, u := range n.usages {
		readings.Store(uuid, u, nil)
	}
	took, err := measure(scrapes, func() error {
		series, err := n.answer(registry)
		if err == nil && series < 2*len(n.claims) {
			err = fmt.Errorf("%s series of %d claims", strconv.Itoa(series), len(n.claims))
		}
		return err
	})
	return took, readings, err
}

// answer writes an answer, and returns how many series of claims and partitions it has.
func (n *scrapedNode) answer(registry *prometheus.Registry) (int, error) {
	families, err := registry.Gather()
	if err != nil {
		return 0, err
	}
	series := 0
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(io.Discard, f); err != nil {
			return 0, err
		}
		if name := f.GetName(); name == "tessera_allocation_info" || strings.HasSuffix(name, "_memory_used_bytes") {
			series += len(f.GetMetric())
		}
	}
	return series, nil
}
