package main

import (
	"bufio"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/test/metrics"
	"github.com/tessera-dra/tessera/test/stack"
)

const (
	// refusedProfile takes all of a GPU, so that another one is allocated after a refusal.
	refusedProfile = "7g.80gb"
	// evicting is the policy's name, and that of the template and the Deployments.
	evicting = "evicting"
)

// refused measures how soon a Deployment's pod runs on another GPU after its node could
// not make its partition, where a policy ends such pods. GPU 0 refuses all partitions; a
// Deployment after the other is given one of it first.
func (b *bench) refused(ctx context.Context) error {
	if b.real {
		return nil // don't partition real hardware
	}
	node := b.stack.Cluster.Nodes()[1]
	if err := b.evictAfterRefusals(ctx, node); err != nil {
		return err
	}
	if err := b.hardware(ctx, node, "fault", "DeviceCreateGpuInstanceWithPlacement", "--gpu", "0", "--code", "999"); err != nil {
		return err
	}
	s := refusalSteps{}
	for i := range b.refusals {
		if err := b.refuse(ctx, node, i, &s); err != nil {
			return fmt.Errorf("refusal %d: %w", i, err)
		}
	}
	s.print(b.report)
	if err := b.refusedMany(ctx, node); err != nil {
		return err
	}
	return b.hardware(ctx, node, "fault", "--clear")
}

// evictAfterRefusals makes a policy that ends pods whose devices are refused, and a template
// of claims for a partition.
func (b *bench) evictAfterRefusals(ctx context.Context, node string) error {
	const policy = `{apiVersion: gpu.tessera.dev/v1alpha1, kind: SharingPolicy, metadata: {name: %s},
spec: {priority: 100, nodeSelector: {matchLabels: {kubernetes.io/hostname: %s}}, plan: {partitioned: {profiles: [%s]}}, health: {onPrepareFailure: Evict}}}`
	if err := b.applyPolicy(ctx, fmt.Sprintf(policy, evicting, node, refusedProfile)); err != nil {
		return err
	}
	t := &resourcev1.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: evicting},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
			Requests: []resourcev1.DeviceRequest{{
				Name: "gpu",
				Exactly: &resourcev1.ExactDeviceRequest{
					DeviceClassName: "mig.nvidia.com",
					Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
						Expression: fmt.Sprintf("device.attributes[%q].profile == %q", driver, refusedProfile),
					}}},
				},
			}},
		}}},
	}
	if _, err := b.stack.Kube().ResourceV1().ResourceClaimTemplates(namespace).Create(ctx, t, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create claim template: %w", err)
	}
	return nil
}

// refusalSteps are the steps from the moment when a pod is bound to a GPU that refuses its
// partition until another pod runs.
type refusalSteps struct {
	tainted, evicted, created, bound, running, all sample
}

func (s *refusalSteps) add(r *seenRefusal) {
	s.tainted = append(s.tainted, r.tainted-r.firstBound)
	s.evicted = append(s.evicted, r.evicted-r.tainted)
	s.created = append(s.created, r.created-r.evicted)
	s.bound = append(s.bound, r.bound-r.created)
	s.running = append(s.running, r.running-r.bound)
	s.all = append(s.all, r.running-r.firstBound)
}

func (s *refusalSteps) print(r report) {
	r.percentiles("refusal_bound_to_taint", s.tainted)
	r.percentiles("refusal_taint_to_eviction", s.evicted)
	r.percentiles("refusal_eviction_to_new_pod", s.created)
	r.percentiles("refusal_new_pod_to_bound", s.bound)
	r.percentiles("refusal_bound_to_running", s.running)
	r.percentiles("refusal_to_running_elsewhere", s.all)
}

// seenRefusal has when the API server showed what, of the pods of one Deployment.
type seenRefusal struct {
	first, second                                         string // the pods' names
	firstBound, tainted, evicted, created, bound, running time.Duration
}

// refuse runs a Deployment whose first pod is given a partition of the GPU that refuses
// all, and makes the node forget the refusal.
func (b *bench) refuse(ctx context.Context, node string, round int, steps *refusalSteps) error {
	before, err := b.failedPrepares(ctx, node)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	name := fmt.Sprintf("%s-%d", evicting, round)
	w, err := b.watchRefusal(ctx, &running, node, name)
	if err != nil {
		return err
	}
	if err := b.deploy(ctx, node, name); err != nil {
		return err
	}
	if err := w.await(ctx, func(s *seenRefusal) bool { return s.running > 0 }); err != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		return fmt.Errorf("wait for the second pod to run: %w; seen: %+v", err, *w.seen)
	}
	after, err := b.failedPrepares(ctx, node)
	if err != nil {
		return err
	}
	if after-before != 1 {
		return fmt.Errorf("%d prepares failed, want 1", after-before)
	}
	steps.add(w.seen)
	b.progress("refusal %d: runs elsewhere after %v", round, w.seen.running-w.seen.firstBound)
	return b.forgetRefusal(ctx, node, name)
}

func (b *bench) deploy(ctx context.Context, node, name string) error {
	pod := newPod(name, stack.TestImage, node, &corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new(evicting)})
	pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
	pod.Labels = map[string]string{"app": name}
	d := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(1)),
			Selector: &metav1.LabelSelector{MatchLabels: pod.Labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels}, Spec: pod.Spec},
		},
	}
	if _, err := b.stack.Kube().AppsV1().Deployments(namespace).Create(ctx, d, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create Deployment %s: %w", name, err)
	}
	return nil
}

// watchRefusal follows the pods of a Deployment and the slices of a node until ctx ends.
func (b *bench) watchRefusal(ctx context.Context, running *sync.WaitGroup, node, name string) (*watched[*seenRefusal], error) {
	kube := b.stack.Kube()
	pods, err := kube.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
	if err != nil {
		return nil, fmt.Errorf("watch pods of %s: %w", name, err)
	}
	published, err := kube.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourcev1.ResourceSliceSelectorNodeName, node).String(),
	})
	if err != nil {
		pods.Stop()
		return nil, fmt.Errorf("watch ResourceSlices of %s: %w", node, err)
	}
	w := &watched[*seenRefusal]{timeout: timeout, seen: &seenRefusal{}}
	running.Go(func() { follow(w, pods, "pods of "+name, w.seen.addPod) })
	running.Go(func() { follow(w, published, "ResourceSlices of "+node, w.seen.addSlice) })
	return w, nil
}

func (s *seenRefusal) addPod(t watch.EventType, p *corev1.Pod, at time.Duration) {
	switch {
	case s.first == "":
		s.first = p.Name
	case s.first != p.Name && s.second == "":
		s.second, s.created = p.Name, at
	}
	switch p.Name {
	case s.first:
		setOnce(&s.firstBound, at, p.Spec.NodeName != "")
		setOnce(&s.evicted, at, t == watch.Deleted || p.DeletionTimestamp != nil)
	case s.second:
		setOnce(&s.bound, at, p.Spec.NodeName != "")
		setOnce(&s.running, at, p.Status.Phase == corev1.PodRunning)
	}
}

func (s *seenRefusal) addSlice(_ watch.EventType, slice *resourcev1.ResourceSlice, at time.Duration) {
	for _, d := range slice.Spec.Devices {
		for _, t := range d.Taints {
			setOnce(&s.tainted, at, t.Effect == resourcev1.DeviceTaintEffectNoExecute)
		}
	}
}

// setOnce sets a time when something is seen for the first time.
func setOnce(t *time.Duration, at time.Duration, seen bool) {
	if seen && *t == 0 {
		*t = at
	}
}

// forgetRefusal deletes the Deployment with its pods, and has the node forget the refusal.
func (b *bench) forgetRefusal(ctx context.Context, node, name string) error {
	if out, err := b.stack.Kubectl(ctx, "delete", "deployment", "-n", namespace, name, "--cascade=foreground"); err != nil {
		return fmt.Errorf("delete Deployment %s: %w: %s", name, err, out)
	}
	return b.endRefusal(ctx, node)
}

// endRefusal ends the condition of GPU 0 by hand, and waits until the node's devices have no taints.
func (b *bench) endRefusal(ctx context.Context, node string) error {
	me, err := b.stack.Kubectl(ctx, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
	if err != nil {
		return fmt.Errorf("ask for the user's name: %w: %s", err, me)
	}
	ending := fmt.Sprintf("0 %s %s %s measured", gpu.PrepareFailed, time.Now().UTC().Format(time.RFC3339), me)
	if out, err := b.stack.Kubectl(ctx, "annotate", "gpuinventory", node, v1alpha1.AnnotationEndCondition+"="+ending); err != nil {
		return fmt.Errorf("end the condition of GPU 0: %w: %s", err, out)
	}
	return b.awaitUntainted(ctx, node)
}

func (b *bench) awaitUntainted(ctx context.Context, node string) error {
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, timeout, true, func(ctx context.Context) (bool, error) {
		list, err := b.stack.Kube().ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourcev1.ResourceSliceSelectorNodeName + "=" + node})
		if err != nil {
			return false, err
		}
		tainted := func(d resourcev1.Device) bool { return len(d.Taints) > 0 }
		return !slices.ContainsFunc(list.Items, func(s resourcev1.ResourceSlice) bool { return slices.ContainsFunc(s.Spec.Devices, tainted) }), nil
	})
	if err != nil {
		return fmt.Errorf("wait until no device of %s is tainted: %w", node, err)
	}
	return nil
}

// failedPrepares returns how many prepares have failed on a node since its kubelet started.
func (b *bench) failedPrepares(ctx context.Context, node string) (n uint64, _ error) {
	families, err := b.kubeletMetrics(ctx, node)
	if err != nil {
		return 0, err
	}
	for _, m := range families["dra_operations_duration_seconds"].GetMetric() {
		if operationOf(m) == "PrepareResources" && metrics.Label(m, "is_error") == "true" {
			n += m.GetHistogram().GetSampleCount()
		}
	}
	return n, nil
}

// refusedMany has many pods in turn be given a partition that GPU 0 refuses, as if a scheduler
// knew nothing of taints, and counts what is written about it.
func (b *bench) refusedMany(ctx context.Context, node string) (err error) {
	p, err := b.dial(node)
	if err != nil {
		return err
	}
	defer p.close()
	offered, err := b.await(ctx, node, "mig", migGPUs) // as the policy has it
	if err != nil {
		return err
	}
	refused := slices.IndexFunc(offered, func(d resourcev1.Device) bool {
		return *d.Attributes["profile"].StringValue == refusedProfile && *d.Attributes["index"].IntValue == 0
	})
	if refused < 0 {
		return fmt.Errorf("node %s offers no %s of GPU 0", node, refusedProfile)
	}
	b.progress("refusing %d pods", b.refusedPods)
	claims, err := allocatedClaims(ctx, b.stack.Kube(), node, slices.Repeat([]string{offered[refused].Name}, b.refusedPods))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	written, err := watchSlices(ctx, &running, b.stack.Kube(), metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourcev1.ResourceSliceSelectorNodeName, node).String(),
	})
	if err != nil {
		return err
	}
	reports, err := b.watchRetries(ctx, &running, node)
	if err != nil {
		return err
	}
	for i, c := range claims {
		if err := b.reserve(ctx, c, i); err != nil {
			return err
		}
		if err := p.prepare(ctx, c); err == nil {
			return fmt.Errorf("claim %s was prepared, and GPU 0 refuses its partition", c.Name)
		}
	}
	if err := pause(ctx, 5*time.Second); err != nil { // for writes that follow late
		return err
	}
	most, _, _ := written.writes()
	pauses, writes := reports.counts()
	events, err := b.stack.Kube().CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=" + string(gpu.PrepareFailed)})
	if err != nil {
		return fmt.Errorf("list events: %w", err)
	}
	b.figure("refused_pods_pauses", float64(pauses))
	b.figure("refused_pods_slice_writes_per_pause", float64(most)/float64(pauses))
	b.figure("refused_pods_inventory_writes_per_pause", float64(writes)/float64(pauses))
	b.figure("refused_pods_events", float64(len(events.Items)))
	if err := b.deleteClaims(ctx); err != nil {
		return err
	}
	return b.endRefusal(ctx, node)
}

// reserve reserves a claim for a pod, which only the plugin's events name.
func (b *bench) reserve(ctx context.Context, c *resourcev1.ResourceClaim, i int) error {
	name := fmt.Sprintf("refused-%d", i)
	c.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: types.UID(name)}}
	if _, err := b.stack.Kube().ResourceV1().ResourceClaims(namespace).UpdateStatus(ctx, c, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("reserve claim %s: %w", c.Name, err)
	}
	return nil
}

// retries counts the writes of an inventory, and the pauses that they tell of.
type retries struct {
	mu     sync.Mutex
	at     map[string]bool
	writes int
}

func (r *retries) counts() (pauses, writes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.at), r.writes
}

// watchRetries follows a node's inventory until ctx ends.
func (b *bench) watchRetries(ctx context.Context, running *sync.WaitGroup, node string) (*retries, error) {
	cmd := b.stack.Command(ctx, "kubectl", "get", "gpuinventory", node, "--watch-only", "-o",
		`jsonpath={.status.gpus[?(@.index==0)].conditions[?(@.type=="PrepareFailed")].retryAt}{"\n"}`)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("watch the inventory of %s: %w", node, err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("watch the inventory of %s: %w", node, err)
	}
	r := &retries{at: map[string]bool{}}
	running.Go(func() {
		defer func() { _ = cmd.Wait() }() // ctx ends it
		for lines := bufio.NewScanner(out); lines.Scan(); {
			r.mu.Lock()
			r.writes++
			if at := lines.Text(); at != "" {
				r.at[at] = true
			}
			r.mu.Unlock()
		}
	})
	return r, nil
}
