package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// pending is how many pods wait for the scheduler at a time. It takes them in their
	// order, so that it is never idle, and decides almost as if each came alone.
	pending = 4
	// reserveTaint keeps pods that don't need a whole node off the hard reserve.
	reserveTaint = "gpu.tessera.dev/reserve"
	// ahead is how many claims are created at once, before their pods.
	ahead = 32
)

// decision is the scheduler's on a pod.
type decision struct {
	bound bool
	// refused is the pod's resourceVersion as unschedulable.
	refused string
}

// decisions follows the pods of the benchmark, by name.
type decisions struct{ watched[map[string]decision] }

func watchDecisions(ctx context.Context, running *sync.WaitGroup, t *packingTrial) (*decisions, error) {
	events, err := t.kube.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("watch pods: %w", err)
	}
	w := &decisions{watched[map[string]decision]{timeout: timeout, seen: map[string]decision{}}}
	running.Go(func() { follow(&w.watched, events, "pods", w.add) })
	return w, nil
}

func (w *decisions) add(t watch.EventType, p *corev1.Pod, _ time.Duration) {
	if t == watch.Deleted {
		delete(w.seen, p.Name)
		return
	}
	d := decision{bound: p.Spec.NodeName != ""}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable && !d.bound {
			d.refused = p.ResourceVersion
		}
	}
	w.seen[p.Name] = d
}

// replayed is a pod of a replay.
type replayed struct {
	arrival
	name string
}

// player replays arrivals.
type player struct {
	*packingTrial
	decisions *decisions
	// waiting for the scheduler, and placed, by their end.
	waiting, placed []replayed
	allocated       int64
	created         int
	departures      bool
	tally
}

// tally counts the pods that have arrived and those that failed, by kind.
type tally struct{ came, failed map[string]int }

func newTally() tally { return tally{came: map[string]int{}, failed: map[string]int{}} }

// kind of a pod, as figures name it.
func (s shape) kind() string {
	switch {
	case s.gpus == 0:
		return "cpu"
	case s.milli < wholeGPU:
		return "share"
	}
	return fmt.Sprintf("%dgpu", s.gpus)
}

// The loads of a replay, as parts of the cluster: where arrivals are looked at; and, with
// departures, until where the cluster is filled, the load that is offered then, and how much
// arrives, of which the first third isn't counted.
var loads = []float64{.8, .9, 1}

const filled, offered, arriving = .85, .95, 3.

// replay plays the pods of a trace, and returns the figures.
func (t *packingTrial) replay(ctx context.Context, running *sync.WaitGroup, of trace, p play, seed uint64) (figures []named, err error) {
	r := &player{packingTrial: t, departures: p.departures, tally: newTally()}
	if r.decisions, err = watchDecisions(ctx, running, t); err != nil {
		return nil, err
	}
	until, whole := loads[len(loads)-1], float64(t.capacity)
	if p.departures {
		until = filled + arriving
	}
	all := of.arrivals(seed, int64(until*whole), int64(filled*whole), int64(offered*whole))
	// The first pod finds the scheduler started.
	if err := r.arrive(ctx, all[:1]); err != nil {
		return nil, err
	}
	if err := r.settle(ctx, 0); err != nil {
		return nil, err
	}
	scheduler, controller, err := t.used(ctx)
	if err != nil {
		return nil, err
	}
	if p.departures {
		figures, err = r.steady(ctx, all[1:])
	} else {
		figures, err = r.fill(ctx, all[1:])
	}
	if err != nil {
		return nil, err
	}
	schedulerAfter, controllerAfter, err := t.used(ctx)
	if err != nil {
		return nil, err
	}
	writes, err := t.nodeWrites(ctx)
	if err != nil {
		return nil, err
	}
	each := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(len(all)) }
	return append(figures,
		named{"node_writes_per_node", (writes - t.written) / float64(t.nodes.n)},
		named{"node_writes_per_pod", (writes - t.written) / float64(len(all))},
		named{"controller_cpu_ms_per_pod", each(controllerAfter - controller)},
		named{"scheduler_cpu_ms_per_pod", each(schedulerAfter - scheduler)},
	), nil
}

// fill plays arrivals, and looks at the cluster at each of the loads.
func (r *player) fill(ctx context.Context, all []arrival) (figures []named, err error) {
	for _, load := range loads {
		until := int64(load * float64(r.capacity))
		n := len(all)
		if i := slices.IndexFunc(all, func(a arrival) bool { return a.at >= until }); i >= 0 {
			n = i
		}
		if err := r.arrive(ctx, all[:n]); err != nil {
			return nil, err
		}
		if err := r.settle(ctx, 0); err != nil {
			return nil, err
		}
		all = all[n:]
		at := fmt.Sprintf("_%.0f", 100*load)
		figures = append(figures,
			named{"allocated" + at + "_percent", 100 * float64(r.allocated) / float64(r.capacity)},
			named{"8gpu_failed" + at, float64(r.failed["8gpu"])},
			named{"small_failed" + at, float64(r.failed["1gpu"] + r.failed["share"])},
		)
		r.progress("load %.0f %%: %.1f %% allocated, failed %v of %v", 100*load, figures[len(figures)-3].value, r.failed, r.came)
	}
	return figures, nil
}

// steady plays arrivals and departures, and returns the means of the time after the filling
// and the first third.
func (r *player) steady(ctx context.Context, all []arrival) (figures []named, err error) {
	start := int64((filled + arriving/3) * float64(r.capacity))
	n := slices.IndexFunc(all, func(a arrival) bool { return a.at >= start })
	if err := r.arrive(ctx, all[:n]); err != nil {
		return nil, err
	}
	if err := r.settle(ctx, 0); err != nil {
		return nil, err
	}
	r.progress("counted from now on: %.1f %% allocated, failed %v of %v", 100*float64(r.allocated)/float64(r.capacity), r.failed, r.came)
	r.tally = newTally()
	var sum, weight float64
	for i := range all[n:] {
		a := all[n+i]
		if err := r.arrive(ctx, all[n+i:n+i+1]); err != nil {
			return nil, err
		}
		sum += float64(r.allocated) * float64(a.total())
		weight += float64(a.total())
	}
	if err := r.settle(ctx, 0); err != nil {
		return nil, err
	}
	figures = append(figures, named{"allocated_percent", 100 * sum / weight / float64(r.capacity)})
	for _, kind := range []string{"8gpu", "4gpu", "1gpu", "share"} {
		figures = append(figures, named{kind + "_failed", float64(r.failed[kind])}, named{kind + "_came", float64(r.came[kind])})
	}
	r.progress("%.1f %% allocated, failed %v of %v", figures[0].value, r.failed, r.came)
	return figures, nil
}

// arrive creates pods in their order, and removes those that end before.
func (r *player) arrive(ctx context.Context, all []arrival) error {
	for some := range slices.Chunk(all, ahead) {
		var pods []replayed
		for _, a := range some {
			pods = append(pods, replayed{a, fmt.Sprintf("pod-%06d", r.created)})
			r.created++
		}
		if err := together(pods, func(p replayed) error { return r.createClaim(ctx, p) }); err != nil {
			return err
		}
		for _, p := range pods {
			if err := r.depart(ctx, p.at); err != nil {
				return err
			}
			if err := r.settle(ctx, pending-1); err != nil {
				return err
			}
			if _, err := r.kube.CoreV1().Pods(namespace).Create(ctx, p.pod(), metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("create pod %s: %w", p.name, err)
			}
			r.waiting = append(r.waiting, p)
			r.came[p.kind()]++
		}
	}
	return nil
}

func (r *player) createClaim(ctx context.Context, p replayed) error {
	if p.gpus == 0 {
		return nil
	}
	q := &resourcev1.ExactDeviceRequest{DeviceClassName: driver, AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: p.gpus}
	if p.milli < wholeGPU {
		q.DeviceClassName = sharesClass
		q.Capacity = &resourcev1.CapacityRequirements{Requests: map[resourcev1.QualifiedName]resource.Quantity{
			gpu.MemoryCapacity: *resource.NewQuantity(r.shareMiB*p.milli/wholeGPU<<20, resource.BinarySI),
		}}
	}
	c := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: p.name}}
	c.Spec.Devices.Requests = []resourcev1.DeviceRequest{{Name: "gpu", Exactly: q}}
	if _, err := r.kube.ResourceV1().ResourceClaims(namespace).Create(ctx, c, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create claim %s: %w", p.name, err)
	}
	return nil
}

func (p replayed) pod() *corev1.Pod {
	var claim *corev1.PodResourceClaim
	if p.gpus > 0 {
		claim = &corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: &p.name}
	}
	pod := newPod(p.name, "none", "", claim)
	pod.Spec.NodeSelector = nil
	pod.Spec.AutomountServiceAccountToken = new(false)
	if p.gpus == migGPUs {
		pod.Spec.Tolerations = []corev1.Toleration{{Key: reserveTaint, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
	}
	pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(p.cpuMilli, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(p.memoryMiB<<20, resource.BinarySI),
	}
	return pod
}

// settle waits until at most so many pods wait for the scheduler. A pod that has no room
// fails, and is deleted.
func (r *player) settle(ctx context.Context, left int) error {
	for {
		decided := map[string]decision{}
		err := r.decisions.await(ctx, func(seen map[string]decision) bool {
			for _, p := range r.waiting {
				if d := seen[p.name]; d.bound || d.refused != "" {
					decided[p.name] = d
				}
			}
			return len(r.waiting)-len(decided) <= left
		})
		if err != nil {
			return fmt.Errorf("wait for the scheduler to decide on %s: %w", r.waiting[0].name, err)
		}
		var still []replayed
		for _, p := range r.waiting {
			d := decided[p.name]
			gone := true
			switch {
			case d.bound:
				r.place(p)
			case d.refused != "":
				if gone, err = r.drop(ctx, p, d.refused); err != nil {
					return err
				}
			default:
				gone = false
			}
			if !gone {
				still = append(still, p)
			}
		}
		if r.waiting = still; len(still) <= left {
			return nil
		}
	}
}

func (r *player) place(p replayed) {
	r.allocated += p.total()
	if r.departures {
		i, _ := slices.BinarySearchFunc(r.placed, p.end, func(q replayed, end int64) int { return int(q.end - end) })
		r.placed = slices.Insert(r.placed, i, p)
	}
}

// drop deletes a pod that is as it was when it was refused, and reports whether it was.
func (r *player) drop(ctx context.Context, p replayed, version string) (bool, error) {
	o := metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{ResourceVersion: &version}}
	err := r.kube.CoreV1().Pods(namespace).Delete(ctx, p.name, o)
	if apierrors.IsConflict(err) {
		return false, nil // it has room meanwhile, or is refused again
	}
	if err != nil {
		return false, fmt.Errorf("delete pod %s: %w", p.name, err)
	}
	r.failed[p.kind()]++
	return true, r.release(ctx, p)
}

func (r *player) release(ctx context.Context, p replayed) error {
	if p.gpus == 0 {
		return nil
	}
	return releaseClaim(ctx, r.kube, p.name)
}

// depart deletes the pods that end until a time.
func (r *player) depart(ctx context.Context, now int64) error {
	n := slices.IndexFunc(r.placed, func(p replayed) bool { return p.end > now })
	if n < 0 {
		n = len(r.placed)
	}
	over := slices.Clone(r.placed[:n])
	for _, p := range over {
		r.allocated -= p.total()
	}
	r.placed = slices.Delete(r.placed, 0, n)
	return together(over, func(p replayed) error {
		if err := r.kube.CoreV1().Pods(namespace).Delete(ctx, p.name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
			return fmt.Errorf("delete pod %s: %w", p.name, err)
		}
		return r.release(ctx, p)
	})
}
