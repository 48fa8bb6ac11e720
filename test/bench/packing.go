package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/test/metrics"
)

// packingOptions are those of the part packing.
type packingOptions struct {
	trace string // directory, or "" for a mix as of the trace
	oneOf int    // share of the nodes
	// hard is the number of nodes that the mode hard keeps for whole-node pods.
	hard         int
	seeds        []int
	plays, modes []string
}

// register defines the flags.
func (o *packingOptions) register() {
	o.seeds, o.plays, o.modes = []int{1}, []string{"default"}, []string{"stock", "ranks"}
	flag.StringVar(&o.trace, "packing-trace", "", "directory with nodes.csv, pods-default.csv and pods-gpushare100.csv (default: nodes and pods as in openb)")
	flag.IntVar(&o.oneOf, "packing-one-of", 8, "nodes of the trace of which the part packing has one; 1 for all")
	flag.IntVar(&o.hard, "packing-hard", 1, "nodes that the mode hard keeps for pods that need all GPUs of a node")
	flag.Func("packing-seeds", "seeds of the part packing, such as 1,2,3 (default 1)", func(s string) (err error) {
		o.seeds, err = numbers(s)
		return err
	})
	flag.Func("packing-plays", "of default, gpushare100 and departures (default default)", words(&o.plays))
	flag.Func("packing-modes", "of stock, ranks and hard (default stock,ranks)", words(&o.modes))
}

// ranked are the controller's flags for ranks. Pods come here some twenty a second, and their
// ends free a node, so that the usual pause of a second is that of as many arrivals.
var ranked = []string{"--ranks", "--ranks-pause=0s"}

// mode returns the controller's flags in a mode.
func (o packingOptions) mode(name string) ([]string, error) {
	switch name {
	case "stock":
		return nil, nil
	case "ranks":
		return ranked, nil
	case "hard":
		return append(slices.Clone(ranked), fmt.Sprintf("--ranks-reserve-hard=%d", o.hard)), nil
	}
	return nil, fmt.Errorf("-packing-modes: there is no mode %q, but stock, ranks and hard", name)
}

// play is a way in which the pods of a trace come.
type play struct {
	name, pods string
	departures bool
}

var plays = []play{{"default", "default", false}, {"gpushare100", "gpushare100", false}, {"departures", "default", true}}

// packing replays a trace of nodes and pods against the real scheduler and the
// controller's program: in each mode in turn, the same nodes and pods.
func (b *bench) packing(ctx context.Context) (err error) {
	if b.real || b.bundle != "" {
		return nil // needs the checkout, and says nothing about hardware
	}
	ctrl.SetLogger(logr.Discard())
	ctx = klog.NewContext(ctx, logr.Discard())
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	program, err := buildController(ctx, dir)
	if err != nil {
		return err
	}
	for _, name := range b.packed.plays {
		i := slices.IndexFunc(plays, func(p play) bool { return p.name == name })
		if i < 0 {
			return fmt.Errorf("-packing-plays: there is no play %q", name)
		}
		sums := map[string]means{}
		for _, seed := range b.packed.seeds {
			for _, mode := range b.packed.modes {
				figures, err := b.packingTrial(ctx, program, plays[i], mode, uint64(seed))
				if err != nil {
					return fmt.Errorf("%s, %s, seed %d: %w", name, mode, seed, err)
				}
				for _, f := range figures {
					b.figure(fmt.Sprintf("packing_%s_%s_seed%d_%s", name, mode, seed, f.name), f.value)
				}
				sums[mode] = sums[mode].add(figures)
			}
		}
		for _, mode := range b.packed.modes {
			for _, f := range sums[mode] {
				b.figure(fmt.Sprintf("packing_%s_%s_%s", name, mode, f.name), f.value/float64(len(b.packed.seeds)))
			}
		}
	}
	return nil
}

// named is a figure without the part of its name that all figures of a trial share.
type named struct {
	name  string
	value float64
}

// means are sums of the figures of several seeds.
type means []named

func (m means) add(figures []named) means {
	if m == nil {
		return slices.Clone(figures)
	}
	for i, f := range figures {
		m[i].value += f.value
	}
	return m
}

// packingTrial is one replay, with an API server of its own.
type packingTrial struct {
	*scaleBench
	shapes   []shape
	capacity int64
	shareMiB int64 // memory of a GPU that shares can have
	// scheduler is the process's id.
	scheduler int
	// written is how often Nodes were written before the controller ran.
	written float64
}

func (b *bench) packingTrial(ctx context.Context, program string, p play, mode string, seed uint64) (figures []named, err error) {
	t := mixedTrace(p.pods)
	if b.packed.trace != "" {
		if t, err = readTrace(b.packed.trace, p.pods); err != nil {
			return nil, err
		}
	}
	flags, err := b.packed.mode(mode)
	if err != nil {
		return nil, err
	}
	server, err := startServer(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.stop()) }()
	trial := &packingTrial{scaleBench: &scaleBench{bench: b, server: server}}
	trial.shapes, trial.capacity = t.oneOf(b.packed.oneOf, seed)
	trial.program = program
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	if err := trial.begin(ctx, &running, flags); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, tail(filepath.Join(server.dir, "controller.log")))
	}
	stop, err := trial.beginScheduler(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	b.progress("%s, %s, seed %d: %d nodes, %d GPUs", p.name, mode, seed, len(trial.shapes), trial.capacity/wholeGPU)
	figures, err = trial.replay(ctx, &running, t, p, seed)
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, tail(filepath.Join(server.dir, "controller.log")))
	}
	return figures, trial.running.stop(syscall.SIGTERM)
}

// begin makes the nodes, and waits until the controller has published their GPUs.
func (t *packingTrial) begin(ctx context.Context, running *sync.WaitGroup, flags []string) error {
	if err := t.connect(ctx, running, len(t.shapes)); err != nil {
		return err
	}
	t.nodes.sizes = map[string]int{}
	for i, s := range t.shapes {
		t.nodes.sizes[hollowName(i)] = int(s.gpus)
	}
	if err := t.makeObjects(ctx); err != nil {
		return err
	}
	if err := t.nodes.each(ctx, 0, t.nodes.n, t.nodes.create); err != nil {
		return err
	}
	for i, s := range t.shapes {
		if err := t.equip(ctx, hollowName(i), s); err != nil {
			return err
		}
	}
	var err error
	if t.shareMiB, err = gpu.ShareableMiB(t.nodes.gpus.GPUs[0], gpu.Whole{GPU: t.nodes.gpus.GPUs[0].UUID}); err != nil {
		return err
	}
	if t.written, err = t.nodeWrites(ctx); err != nil {
		return err
	}
	if t.running, err = startController(t.program, t.user, t.dir, flags...); err != nil {
		return err
	}
	if err := t.running.awaitLeader(ctx); err != nil {
		return err
	}
	if err := t.nodes.each(ctx, 0, t.nodes.n, t.nodes.register); err != nil {
		return err
	}
	_, err = t.awaitPools(ctx, t.nodes.n, 0)
	return err
}

// makeObjects makes what pods and claims need, and a policy that offers each GPU as a
// whole and in shares by size.
func (t *packingTrial) makeObjects(ctx context.Context) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	p := &v1alpha1.SharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "bench"}}
	const clients = 48
	p.Spec.Plan.MPS = &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: resource.NewQuantity(1<<20, resource.BinarySI), MaxClients: ptr.To[int32](clients)}}
	for _, o := range []client.Object{ns, p} {
		if err := t.nodes.api.Create(ctx, o); err != nil {
			return fmt.Errorf("create %T %s: %w", o, o.GetName(), err)
		}
	}
	return errors.Join(createClass(ctx, t.kube, driver, "gpu"), createClass(ctx, t.kube, sharesClass, "mps"))
}

const sharesClass = "mps.gpu.nvidia.com"

// equip gives a Node what its kubelet would report. The server has marked it as not ready.
func (t *packingTrial) equip(ctx context.Context, name string, s shape) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := t.nodes.api.Patch(ctx, node, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"taints":null}}`))); err != nil {
		return fmt.Errorf("take the taint of node %s: %w", name, err)
	}
	node.Status.Allocatable = corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(s.cpuMilli, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(s.memoryMiB<<20, resource.BinarySI),
		corev1.ResourcePods:   resource.MustParse("500"),
	}
	node.Status.Capacity = node.Status.Allocatable
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if err := t.nodes.api.Status().Update(ctx, node); err != nil {
		return fmt.Errorf("write the status of node %s: %w", name, err)
	}
	return nil
}

// beginScheduler starts the scheduler of the API server's release.
func (t *packingTrial) beginScheduler(ctx context.Context) (stop func(), err error) {
	config, err := t.kubeconfig(envtest.User{Name: "scheduler", Groups: []string{"system:masters"}})
	if err != nil {
		return nil, err
	}
	t.scheduler, stop, err = startScheduler(ctx, filepath.Join(t.dir, "built", "kube-scheduler"), config, t.dir)
	return stop, err
}

// used returns the processor time of scheduler and controller since their starts.
func (t *packingTrial) used(ctx context.Context) (scheduler, controller time.Duration, err error) {
	if scheduler, err = processorTime(t.scheduler); err == nil {
		controller, err = t.running.processorTime(ctx)
	}
	return scheduler, controller, err
}

// nodeWrites returns how often Nodes were changed.
func (t *packingTrial) nodeWrites(ctx context.Context) (n float64, err error) {
	families, err := t.serverMetrics(ctx)
	if err != nil {
		return 0, err
	}
	for _, m := range families["apiserver_request_total"].GetMetric() {
		if metrics.Label(m, "resource") == "nodes" && slices.Contains([]string{"PUT", "PATCH", "APPLY"}, metrics.Label(m, "verb")) {
			n += m.GetCounter().GetValue()
		}
	}
	return n, nil
}

// words reads words that are separated by commas.
func words(to *[]string) func(string) error {
	return func(s string) error {
		*to = strings.Split(s, ",")
		return nil
	}
}
