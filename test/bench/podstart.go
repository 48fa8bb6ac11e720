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
// prints where the time of both goes.
func (b *bench) pods(ctx context.Context) error {
	b.progress("starting %d pods with a claim and %d without", b.options.pods, b.options.pods)
	with, without := newPodStarts(), newPodStarts()
	for i := range b.options.pods {
		if err := b.startAndDelete(ctx, with, newPod(fmt.Sprintf("with-claim-%d", i), stack.TestImage, b.node, fromTemplate())); err != nil {
			return err
		}
		if err := b.startAndDelete(ctx, without, newPod(fmt.Sprintf("without-claim-%d", i), stack.TestImage, b.node, nil)); err != nil {
			return err
		}
	}
	with.print(b.report, "pod_start_with_claim")
	without.print(b.report, "pod_start_without_claim")
	b.figure("pod_start_ratio", with.running.percentile(50)/without.running.percentile(50))
	return nil
}

// podStarts are starts of similar pods.
type podStarts struct {
	bound, running sample
	// operations has the time of the kubelet's operations: container runtime
	// calls, and preparing claims.
	operations map[string]sample
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
