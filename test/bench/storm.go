package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/control"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	nodereport "github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// storm measures what is written when all GPUs of many nodes fail at once: a real API
// server, the controller's code, and of each node that of the plugin from the XID to
// the report. There is no hardware and no kubelet.
func (b *bench) storm(ctx context.Context) (err error) {
	if b.real || b.bundle != "" {
		return nil // needs the checkout, and says nothing about hardware
	}
	server, err := startServer(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	config := server.config
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	ctx, cancel := context.WithCancelCause(klog.NewContext(ctx, logr.Discard()))
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel(nil)
	running.Go(func() {
		if err := control.Run(ctx, control.Config{REST: config, MetricsAddress: "0", HealthAddress: "0"}); err != nil {
			cancel(fmt.Errorf("run the controller: %w", err))
		}
	})
	written, err := watchSlices(ctx, &running, kube, metav1.ListOptions{})
	if err != nil {
		return err
	}
	written.timeout += time.Duration(b.stormNodes) * timeoutPerNode
	b.progress("publishing %d nodes of %d GPUs each", b.stormNodes, migGPUs)
	var nodes []*hollowNode
	for i := range b.stormNodes {
		n, err := startHollowNode(ctx, &running, kube, config, i)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
	}
	all := b.stormNodes * migGPUs
	if err := written.await(ctx, func(s *seenSlices) bool { return s.complete(b.stormNodes) }); err != nil {
		return fmt.Errorf("wait for %d nodes to be published: %w", b.stormNodes, err)
	}
	before := written.reset()
	b.progress("%d GPUs fail, in %d slices", all, before)
	start := monotonic()
	// As many at a time as this process has the time for: a node has processors of its own.
	for batch := range slices.Chunk(nodes, 20) {
		if err := failTogether(ctx, batch); err != nil {
			return err
		}
	}
	if err := written.await(ctx, func(s *seenSlices) bool { return len(s.tainted) == all }); err != nil {
		return fmt.Errorf("wait for %d GPUs to be tainted: %w", all, err)
	}
	b.figure("health_storm_all_tainted_s", (written.lastChange() - start).Seconds())
	return b.countWrites(ctx, "health_storm_writes_per_slice", written, before)
}

// countWrites prints how often the slice was written that was written most often,
// after waiting for writes that follow late.
func (b *bench) countWrites(ctx context.Context, figure string, w *sliceWatch, want int) error {
	const late = 5 * time.Second // readings that disagree come every four seconds
	if err := pause(ctx, late); err != nil {
		return err
	}
	most, written, again := w.writes()
	b.figure(figure, float64(most))
	if again > 0 {
		b.progress("%d of %d slices were written more than once", again, want)
	}
	if written != want {
		return fmt.Errorf("%d of %d slices were written", written, want)
	}
	return nil
}

// hollowNode is a Node object without a machine, and the part of its plugin that knows
// of GPUs' health.
type hollowNode struct {
	gpus    []gpu.UUID
	monitor *healthmonitor.Monitor
	broken  atomic.Bool
	sick    atomic.Int32 // readings since
}

// startHollowNode makes the Node and runs its plugin until ctx ends.
func startHollowNode(ctx context.Context, running *sync.WaitGroup, kube kubernetes.Interface, config *rest.Config, i int) (*hollowNode, error) {
	name := fmt.Sprintf("node-%03d", i)
	if _, err := kube.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		return nil, fmt.Errorf("create node %s: %w", name, err)
	}
	there, err := offertest.Node("h100-80gb", migGPUs)
	if err != nil {
		return nil, fmt.Errorf("simulate a node: %w", err)
	}
	there.Name = name
	f, n := facts.New(name), &hollowNode{}
	for g := range there.GPUs {
		there.GPUs[g].UUID = gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-%012x", g+1, i))
		n.gpus = append(n.gpus, there.GPUs[g].UUID)
	}
	reporter, err := nodereport.New(nodereport.Config{NodeName: name, PluginVersion: "bench", BootID: "boot", REST: config, Facts: f})
	if err != nil {
		return nil, err
	}
	records, end, err := openRecords()
	if err != nil {
		return nil, err
	}
	n.monitor = healthmonitor.New(healthmonitor.Config{
		NodeName: name, BootID: "boot", Journal: records, Facts: f, Registerer: prometheus.NewRegistry(), Events: noEvents{},
		Sharing: sharing.New(sharing.Config{Journal: records, BootID: "boot"}), Readings: usage.NewReadings(f, nil, false),
	})
	n.monitor.SetHardware(&healthmonitor.Hardware{Session: n})
	running.Go(func() {
		defer end()
		n.monitor.Run(ctx)
	})
	running.Go(func() { _ = reporter.Run(ctx) })
	f.Found(there)
	f.SetRegistered()
	return n, nil
}

// Vitals of a GPU, which all fail at once.
func (n *hollowNode) Vitals(gpu.UUID) (gpu.Vitals, error) {
	if !n.broken.Load() {
		return gpu.Vitals{Recovery: gpu.RecoveryNone}, nil
	}
	n.sick.Add(1)
	return gpu.Vitals{Recovery: gpu.RecoveryReset}, nil
}

// Usage of a GPU, for which nobody asks.
func (*hollowNode) Usage(gpu.UUID, time.Duration) (gpu.Usage, error) { return gpu.Usage{}, nil }

// EndUsage has nothing to end.
func (*hollowNode) EndUsage(gpu.UUID) bool { return true }

// Probe returns the GPUs that don't respond: none.
func (*hollowNode) Probe() []string { return nil }

// failTogether breaks all GPUs of the nodes, with an XID each, and returns when all have
// been read since.
func failTogether(ctx context.Context, nodes []*hollowNode) error {
	for _, n := range nodes {
		n.broken.Store(true)
		for _, uuid := range n.gpus {
			n.monitor.SawXID(gpu.XID{GPU: uuid, Code: 95, At: time.Now()})
		}
	}
	return wait.PollUntilContextTimeout(ctx, 5*time.Millisecond, timeout, true, func(context.Context) (bool, error) {
		return !slices.ContainsFunc(nodes, func(n *hollowNode) bool { return n.sick.Load() < migGPUs }), nil
	})
}

// openRecords returns a journal in memory: the time of disks is another figure.
func openRecords() (j *journal.Journal, end func(), _ error) {
	dir, err := os.MkdirTemp("/dev/shm", "tessera-bench-")
	if err != nil {
		return nil, nil, fmt.Errorf("make a directory in memory: %w", err)
	}
	if j, err = journal.Open(dir, nil); err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	return j, func() { _, _ = j.Close(), os.RemoveAll(dir) }, nil
}

type noEvents struct{}

func (noEvents) WarnPod(string, holding.Pod, string, string) {}
func (noEvents) OnNode(string, string, string)               {}
