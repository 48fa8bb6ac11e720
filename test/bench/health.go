package main

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
	"github.com/tessera-dra/tessera/test/stack"
)

// healthRounds is how often each GPU of the node breaks and heals: twice, because a
// GPU that breaks again and again is trusted later each time.
const healthRounds = 2

// health measures how soon the cluster knows that a GPU is broken, and that it has
// recovered. A pod has all GPUs of a node; its status shows what its kubelet knows.
func (b *bench) health(ctx context.Context) error {
	if b.real {
		return nil // don't break real hardware
	}
	node := b.stack.Cluster.Nodes()[1]
	pod, err := b.podWithAll(ctx, node)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	kube := b.stack.Kube()
	of := metav1.ListOptions{FieldSelector: fields.SelectorFromSet(fields.Set{
		resourcev1.ResourceSliceSelectorNodeName: node, resourcev1.ResourceSliceSelectorDriver: driver,
	}).String()}
	slices, err := watchSlices(ctx, &running, kube, of)
	if err != nil {
		return err
	}
	status, err := watchStatus(ctx, &running, b.stack.Kube(), pod)
	if err != nil {
		return err
	}
	h := &healthBench{bench: b, node: node, slices: slices, status: status}
	if h.names, err = h.devices(); err != nil {
		return err
	}
	for range healthRounds {
		if err := h.round(ctx); err != nil {
			return err
		}
	}
	b.percentiles("health_xid_to_taint", h.taint)
	b.percentiles("health_xid_to_pod_status", h.pod)
	b.figure("health_lift_after_recovery_p50_s", h.lift.percentile(50)/1000)
	b.figure("health_lift_after_recovery_s", h.lift.percentile(100)/1000)
	if err := h.storm(ctx); err != nil {
		return err
	}
	if err := h.comeAndGo(ctx); err != nil {
		return err
	}
	return deletePod(ctx, kube, pod)
}

// podWithAll starts a pod that has all GPUs of a node, and returns its name.
func (b *bench) podWithAll(ctx context.Context, node string) (string, error) {
	kube := b.stack.Kube()
	t := &resourcev1.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: "all-gpus"},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
			Requests: []resourcev1.DeviceRequest{{
				Name:    "gpus",
				Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: driver, AllocationMode: resourcev1.DeviceAllocationModeAll},
			}},
		}}},
	}
	if _, err := kube.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, t, metav1.CreateOptions{}); err != nil {
		return "", fmt.Errorf("create claim template: %w", err)
	}
	claim := &corev1.PodResourceClaim{Name: "gpus", ResourceClaimTemplateName: &t.Name}
	const name = "has-all-gpus"
	_, err := startPod(ctx, kube, newPod(name, stack.TestImage, node, claim))
	return name, err
}

// healthBench breaks the GPUs of a node.
type healthBench struct {
	*bench
	node   string
	names  map[int64]string // of the whole GPUs, by index
	slices *sliceWatch
	status *statusWatch

	taint, pod, lift sample
}

// devices returns the names of the whole GPUs.
func (h *healthBench) devices() (map[int64]string, error) {
	h.slices.mu.Lock()
	defer h.slices.mu.Unlock()
	names := map[int64]string{}
	for _, s := range h.slices.seen.slices {
		for _, d := range ofType([]resourcev1.ResourceSlice{*s}, "gpu") {
			names[*d.Attributes["index"].IntValue] = d.Name
		}
	}
	if len(names) != migGPUs {
		return nil, fmt.Errorf("node %s offers %d GPUs, want %d", h.node, len(names), migGPUs)
	}
	return names, nil
}

// round breaks one GPU after the other, and heals all.
func (h *healthBench) round(ctx context.Context) error {
	if err := h.status.await(ctx, func(health map[string]seenHealth) bool { return len(health) == migGPUs && !anyUnhealthy(health) }); err != nil {
		return fmt.Errorf("wait for the pod's status: %w", err)
	}
	for i := range int64(migGPUs) {
		broke, err := h.simulate(ctx, "break", strconv.FormatInt(i, 10), "--xid", "95", "--recovery", "reset")
		if err != nil {
			return err
		}
		g := simulatedGPU{h.node, i}
		if err := h.slices.await(ctx, func(s *seenSlices) bool { return s.tainted[g] > 0 }); err != nil {
			return fmt.Errorf("wait for the taint of GPU %d: %w", i, err)
		}
		if err := h.status.await(ctx, func(health map[string]seenHealth) bool { return health[h.names[i]].unhealthy() }); err != nil {
			return fmt.Errorf("wait for the pod to see GPU %d: %w", i, err)
		}
		h.taint = append(h.taint, h.slices.taintedSince(g)-broke)
		h.pod = append(h.pod, h.status.since(h.names[i])-broke)
	}
	return h.heal(ctx)
}

// heal heals all GPUs, and measures when they are offered again.
func (h *healthBench) heal(ctx context.Context) error {
	healed, err := h.simulate(ctx, "heal")
	if err != nil {
		return err
	}
	for left := migGPUs; left > 0; {
		var now int
		if err := h.slices.await(ctx, func(s *seenSlices) bool { now = len(s.tainted); return now < left }); err != nil {
			return fmt.Errorf("wait for %d GPUs to lose their taints: %w", left, err)
		}
		for ; left > now; left-- {
			h.lift = append(h.lift, h.slices.lastChange()-healed)
		}
	}
	return nil
}

// storm loses all GPUs at once, and counts the writes.
func (h *healthBench) storm(ctx context.Context) error {
	before := h.slices.reset()
	all := []string{"break"}
	for i := range migGPUs {
		all = append(all, strconv.Itoa(i))
	}
	if _, err := h.simulate(ctx, append(all, "--lost", "--recovery", "reboot")...); err != nil {
		return err
	}
	if err := h.slices.await(ctx, func(s *seenSlices) bool { return len(s.tainted) == migGPUs }); err != nil {
		return fmt.Errorf("wait for all GPUs to be tainted: %w", err)
	}
	if err := h.countWrites(ctx, "health_storm_node_writes_per_slice", h.slices, before); err != nil {
		return err
	}
	return h.heal(ctx)
}

// comeAndGo loses one GPU for a second every ten seconds, and counts the writes.
func (h *healthBench) comeAndGo(ctx context.Context) error {
	if h.flapping == 0 {
		return nil
	}
	h.progress("losing a GPU again and again for %v", h.flapping)
	h.slices.reset()
	for end := time.Now().Add(h.flapping); time.Now().Before(end); {
		for _, step := range []struct {
			args  []string
			pause time.Duration
		}{{[]string{"break", "0", "--lost", "--recovery", "reboot"}, time.Second}, {[]string{"heal"}, 9 * time.Second}} {
			if err := h.hardware(ctx, h.node, step.args...); err != nil {
				return err
			}
			if err := pause(ctx, step.pause); err != nil {
				return err
			}
		}
	}
	most, _, _ := h.slices.writes()
	h.figure("health_flapping_writes_per_slice_per_min", float64(most)/h.flapping.Minutes())
	// Nothing is to be written while later parts measure.
	if err := h.slices.await(ctx, func(s *seenSlices) bool { return len(s.tainted) == 0 }); err != nil {
		return fmt.Errorf("wait for the GPU to lose its taints: %w", err)
	}
	return nil
}

// simulate runs the simulator's command, and returns the time of the first record that
// it has added to the kernel log.
func (h *healthBench) simulate(ctx context.Context, args ...string) (at time.Duration, err error) {
	before, err := h.kernelLog(ctx)
	if err != nil {
		return 0, err
	}
	if err := h.hardware(ctx, h.node, args...); err != nil {
		return 0, err
	}
	after, err := h.kernelLog(ctx)
	if err != nil {
		return 0, err
	}
	record, ok := bytes.CutPrefix(after, before)
	header := strings.Split(string(record), ",")
	if !ok || len(header) < 3 {
		return 0, fmt.Errorf("nvmlsim %s wrote no record to the kernel log", strings.Join(args, " "))
	}
	micros, err := strconv.ParseInt(header[2], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read the kernel log of %s: %w", h.node, err)
	}
	return time.Duration(micros) * time.Microsecond, nil
}

// kernelLog returns the simulated kernel log of the node. It is empty before the first
// record.
func (h *healthBench) kernelLog(ctx context.Context) ([]byte, error) {
	var log bytes.Buffer
	path := filepath.Join(stack.DriverRoot, nvmlsim.KernelLogFile)
	err := h.stack.Cluster.Run(ctx, h.node, cluster.Stdio{Out: &log}, "sh", "-c", `[ ! -e "$0" ] || cat "$0"`, path)
	if err != nil {
		return nil, fmt.Errorf("read the kernel log of %s: %w", h.node, err)
	}
	return log.Bytes(), nil
}

func (w *sliceWatch) taintedSince(g simulatedGPU) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen.tainted[g]
}

func (s seenHealth) unhealthy() bool { return s.health == corev1.ResourceHealthStatusUnhealthy }

func anyUnhealthy(all map[string]seenHealth) bool {
	for _, s := range all {
		if s.health != corev1.ResourceHealthStatusHealthy {
			return true
		}
	}
	return false
}
