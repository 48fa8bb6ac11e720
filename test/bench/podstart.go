package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	corev1 "k8s.io/api/core/v1"

	"github.com/tessera-dra/tessera/test/metrics"
	"github.com/tessera-dra/tessera/test/stack"
)

// pods compares the start of a pod that has a claim with one that has none, and
// prints where the time of both goes; with -user-namespaces also for pods that have one.
func (b *bench) pods(ctx context.Context) error {
	namespaces := []bool{false}
	if b.userNamespaces {
		namespaces = append(namespaces, true)
	}
	b.progress("starting %d pods with a claim and %d without; with user namespaces, too: %t", b.options.pods, b.options.pods, b.userNamespaces)
	pairs := map[bool]*podPairs{false: newPodPairs(), true: newPodPairs()}
	for i := range b.options.pods {
		for _, own := range namespaces {
			if err := b.startPair(ctx, pairs[own], i, own); err != nil {
				return err
			}
		}
	}
	for _, own := range namespaces {
		name := "pod_start"
		if own {
			name += "_user_namespace"
		}
		pairs[own].print(b.report, name)
	}
	return nil
}

// podPairs are starts of pods in turn, with a claim and without.
type podPairs struct{ with, without *podStarts }

func newPodPairs() *podPairs { return &podPairs{with: newPodStarts(), without: newPodStarts()} }

// startPair adds the starts of two pods, whose user namespaces are their own or the host's.
func (b *bench) startPair(ctx context.Context, pair *podPairs, round int, userNamespace bool) error {
	start := func(starts *podStarts, kind string, claim *corev1.PodResourceClaim) error {
		pod := newPod(fmt.Sprintf("%s-claim-%d", kind, round), stack.TestImage, b.node, claim)
		if userNamespace {
			pod.Name += "-userns"
			pod.Spec.HostUsers = new(false)
		}
		return b.startAndDelete(ctx, starts, pod)
	}
	if err := start(pair.with, "with", fromTemplate()); err != nil {
		return err
	}
	return start(pair.without, "without", nil)
}

func (p *podPairs) print(r report, name string) {
	p.with.print(r, name+"_with_claim")
	p.without.print(r, name+"_without_claim")
	r.figure(name+"_ratio", p.with.running.percentile(50)/p.without.running.percentile(50))
	with, without := p.with.steps(), p.without.steps()
	for _, step := range slices.Sorted(maps.Keys(without)) {
		if len(with[step]) != len(without[step]) {
			continue // an operation that not every pod had
		}
		adds := with[step].minus(without[step])
		for _, percent := range []int{25, 50, 75} {
			r.figure(fmt.Sprintf("%s_claim_adds_%s_p%d_ms", name, step, percent), adds.percentile(percent))
		}
	}
}

// podStarts are starts of similar pods.
type podStarts struct {
	bound, running sample
	// operations has the time of the kubelet's operations: container runtime
	// calls, and preparing claims.
	operations map[string]sample
}

// steps are the samples by their names.
func (s *podStarts) steps() map[string]sample {
	all := maps.Clone(s.operations)
	all["bound"], all["running"] = s.bound, s.running
	return all
}

func newPodStarts() *podStarts { return &podStarts{operations: map[string]sample{}} }

func (s *podStarts) print(r report, name string) {
	r.figure(name+"_p50_ms", s.running.percentile(50))
	r.figure(name+"_bound_p50_ms", s.bound.percentile(50))
	for _, operation := range slices.Sorted(maps.Keys(s.operations)) {
		r.figure(name+"_"+operation+"_p50_ms", s.operations[operation].percentile(50))
	}
}

// startAndDelete adds the start of one pod.
func (b *bench) startAndDelete(ctx context.Context, starts *podStarts, pod *corev1.Pod) error {
	before, err := b.kubeletTimes(ctx)
	if err != nil {
		return err
	}
	bound, running, err := startBoundPod(ctx, b.stack.Kube(), pod)
	if err != nil {
		return err
	}
	after, err := b.kubeletTimes(ctx)
	if err != nil {
		return err
	}
	starts.bound, starts.running = append(starts.bound, bound), append(starts.running, running)
	for operation, total := range after {
		if took := total - before[operation]; took > 0 {
			starts.operations[operation] = append(starts.operations[operation], took)
		}
	}
	return deletePod(ctx, b.stack.Kube(), pod.Name)
}

// kubeletHistograms are the kubelet's metrics of its operations to start a pod, all
// labelled with operations of these names.
var kubeletHistograms = map[string][]string{
	"kubelet_runtime_operations_duration_seconds": {"run_podsandbox", "create_container", "start_container"},
	"dra_operations_duration_seconds":             {"PrepareResources"},
}

// containerOperation is the sum of a container's creation and start: containerd runs the hooks when
// the kubelet starts it, CRI-O when the kubelet creates it.
const containerOperation = "container"

// kubeletTimes returns the time that the kubelet has spent on each operation
// since it started.
func (b *bench) kubeletTimes(ctx context.Context) (map[string]time.Duration, error) {
	families, err := b.kubeletMetrics(ctx, b.node)
	if err != nil {
		return nil, err
	}
	times := map[string]time.Duration{}
	for name, operations := range kubeletHistograms {
		for _, m := range families[name].GetMetric() {
			if o := operationOf(m); slices.Contains(operations, o) {
				times[strings.ToLower(o)] += time.Duration(m.GetHistogram().GetSampleSum() * float64(time.Second))
			}
		}
	}
	times[containerOperation] = times["create_container"] + times["start_container"]
	return times, nil
}

// kubeletMetrics returns the metrics of a node's kubelet.
func (b *bench) kubeletMetrics(ctx context.Context, node string) (metrics.Families, error) {
	return metrics.Server(ctx, b.stack.Kube().CoreV1().RESTClient(), "/api/v1/nodes", node, "proxy/metrics")
}

// operationOf returns the operation that a metric is about.
func operationOf(m *dto.Metric) string {
	return cmp.Or(metrics.Label(m, "operation_type"), metrics.Label(m, "operation_name"))
}
