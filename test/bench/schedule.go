package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/sim/cluster"
)

// maxScheduled is how many pods are scheduled at a time, where the nodes have
// room for so many.
const maxScheduled = 100

// scheduling measures how many pods a second Kubernetes' scheduler binds over
// hollow nodes: Node objects without machines, and the slices that are
// published for eight H100s each. There are no kubelets and no controllers, so
// that the scheduler and the API server have the machine to themselves, and
// the scheduler may send as many requests as it wants: with the 50 a second
// that are its default, they would be all that is measured.
type scheduling struct {
	report
	cluster   *cluster.Cluster
	kube      kubernetes.Interface
	publisher *publish.Publisher
	// nodes there are now.
	nodes int
}

// wanted has the requests of the claims of one measurement.
type wanted struct {
	name, class, profile string
	perNode              int
}

// schedule measures on a cluster of its own, once.
func (b *bench) schedule(ctx context.Context) error {
	if b.real || b.scheduled {
		return nil
	}
	b.scheduled = true
	o := cluster.Options{Name: "bench-schedule", Log: os.Stderr}
	if b.bundle != "" {
		o.BinDir = filepath.Join(b.bundle, "bin")
	}
	c, err := cluster.Up(ctx, o)
	if err != nil {
		return err
	}
	if !b.keep {
		defer func() { _ = c.Down(context.WithoutCancel(ctx)) }()
	}
	s := &scheduling{report: b.report, cluster: c}
	if err := s.begin(ctx); err != nil {
		return err
	}
	for _, nodes := range b.scheduleNodes {
		if err := s.grow(ctx, nodes); err != nil {
			return err
		}
		for _, w := range []wanted{
			{"whole", driver, "", migGPUs}, {"mig", "mig.nvidia.com", migProfile, migGPUs * migEach}, {"3g", "mig.nvidia.com", "3g.40gb", migGPUs * 2},
		} {
			if err := s.measure(ctx, w); err != nil {
				return err
			}
		}
	}
	return nil
}

// numbers reads numbers that are separated by commas.
func numbers(s string) (out []int, err error) {
	for part := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil, err
		}
		out = append(out, n)
	}
	return out, nil
}

// begin leaves nothing running but etcd and the API server, and makes what
// claims and pods need.
func (s *scheduling) begin(ctx context.Context) error {
	const controlPlane = "control-plane"
	node := s.cluster.Nodes()[0]
	if err := s.cluster.PowerOff(ctx, node); err != nil {
		return err
	}
	for _, component := range []string{"kube-scheduler", "kube-controller-manager"} {
		if err := s.cluster.Stop(ctx, controlPlane, component); err != nil {
			return err
		}
	}
	config, err := s.cluster.RESTConfig()
	if err != nil {
		return err
	}
	if s.kube, err = kubernetes.NewForConfig(config); err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	if s.publisher, err = publish.New(draclient.New(s.kube), s.kube.Discovery()); err != nil {
		return err
	}
	if err := s.kube.CoreV1().Nodes().Delete(ctx, node, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete node %s: %w", node, err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := s.kube.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create namespace: %w", err)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	if _, err := s.kube.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create service account: %w", err)
	}
	return errors.Join(s.class(ctx, driver, "gpu"), s.class(ctx, "mig.nvidia.com", "mig"))
}

func (s *scheduling) class(ctx context.Context, name, kind string) error {
	return createClass(ctx, s.kube, name, kind)
}

// createClass makes a DeviceClass as the chart has it.
func createClass(ctx context.Context, kube kubernetes.Interface, name, kind string) error {
	c := &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.DeviceClassSpec{Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == '%[1]s' && device.attributes['%[1]s'].type == '%[2]s'", driver, kind),
		}}}},
	}
	if _, err := kube.ResourceV1().DeviceClasses().Create(ctx, c, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create device class %s: %w", name, err)
	}
	return nil
}

// grow adds nodes, and publishes their slices, until the server has n of them.
func (s *scheduling) grow(ctx context.Context, nodes int) error {
	s.progress("simulating %d nodes", nodes)
	for ; s.nodes < nodes; s.nodes++ {
		if err := s.addNode(ctx, fmt.Sprintf("simulated-%03d", s.nodes)); err != nil {
			return err
		}
	}
	return nil
}

func (s *scheduling) addNode(ctx context.Context, name string) error {
	nodes := s.kube.CoreV1().Nodes()
	n, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create node %s: %w", name, err)
	}
	n.Status.Allocatable = corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("192"), corev1.ResourceMemory: resource.MustParse("2Ti"), corev1.ResourcePods: resource.MustParse("250"),
	}
	n.Status.Capacity = n.Status.Allocatable
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if _, err := nodes.UpdateStatus(ctx, n, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("update status of node %s: %w", name, err)
	}
	pool, err := published(metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: name, UID: n.UID})
	if err != nil {
		return err
	}
	return s.publisher.Write(ctx, nil, pool)
}

// measure schedules a few times, a single node being soon full, and prints the
// median and the average cost of a pod.
func (s *scheduling) measure(ctx context.Context, w wanted) error {
	const rounds = 3
	pods := min(s.nodes*w.perNode, maxScheduled)
	var rates []float64
	var cost time.Duration // small ones are counted in steps of 10 ms
	for range rounds {
		took, cpu, err := s.round(ctx, w, pods)
		if err != nil {
			return err
		}
		rates = append(rates, float64(pods-1)/took.Seconds())
		cost += cpu
	}
	slices.Sort(rates)
	suffix := fmt.Sprintf("_%s_%dnodes", w.name, s.nodes)
	s.figure("schedule_pods_per_s"+suffix, rates[rounds/2])
	s.figure("schedule_cpu_ms_per_pod"+suffix, float64(cost.Milliseconds())/float64(rounds*pods))
	return nil
}

// round makes the pods first and then starts a scheduler, and returns how long
// it took from the first pod bound to the last, and the scheduler's processor
// time meanwhile.
func (s *scheduling) round(ctx context.Context, w wanted, pods int) (took, cpu time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 6*time.Minute)
	defer cancel()
	var names []string
	for i := range pods {
		names = append(names, fmt.Sprintf("pod-%03d", i))
	}
	if err := together(names, func(name string) error { return s.create(ctx, w, name) }); err != nil {
		return 0, 0, err
	}
	bound, err := s.kube.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName!="})
	if err != nil {
		return 0, 0, fmt.Errorf("watch pods: %w", err)
	}
	defer bound.Stop()
	pid, stop, err := s.startScheduler(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer stop()
	seen := make(map[string]bool)
	var first time.Time
	var before time.Duration
	for e := range bound.ResultChan() {
		if p, ok := e.Object.(*corev1.Pod); ok {
			seen[p.Name] = true
		}
		if first.IsZero() {
			first = time.Now()
			if before, err = processorTime(pid); err != nil {
				return 0, 0, err
			}
		}
		if len(seen) < pods {
			continue
		}
		took = time.Since(first)
		after, err := processorTime(pid)
		return took, after - before, errors.Join(err, s.removeAll(ctx, names))
	}
	return 0, 0, fmt.Errorf("only %d of %d pods were bound in time", len(seen), pods)
}

// create makes a claim and a pod of that name.
func (s *scheduling) create(ctx context.Context, w wanted, name string) error {
	request := &resourcev1.ExactDeviceRequest{DeviceClassName: w.class}
	if w.profile != "" {
		request.Selectors = []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes[%q].profile == %q", driver, w.profile),
		}}}
	}
	c := &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "gpu", Exactly: request}}}},
	}
	if _, err := s.kube.ResourceV1().ResourceClaims(namespace).Create(ctx, c, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create claim %s: %w", name, err)
	}
	p := newPod(name, "none", "", &corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: &name})
	p.Spec.NodeSelector = nil
	p.Spec.AutomountServiceAccountToken = new(false)
	p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}} // no kubelet marks the nodes as ready
	if _, err := s.kube.CoreV1().Pods(namespace).Create(ctx, p, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create pod %s: %w", name, err)
	}
	return nil
}

// removeAll does what kubelets and controllers would: pods go at once, and
// claims lose their finalizers.
func (s *scheduling) removeAll(ctx context.Context, names []string) error {
	return together(names, func(name string) error {
		if err := s.kube.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
			return fmt.Errorf("delete pod %s: %w", name, err)
		}
		return releaseClaim(ctx, s.kube, name)
	})
}

// releaseClaim deletes a claim whose pod is gone, as kubelet and controllers would.
func releaseClaim(ctx context.Context, kube kubernetes.Interface, name string) error {
	claims := kube.ResourceV1().ResourceClaims(namespace)
	if _, err := claims.Patch(ctx, name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("release claim %s: %w", name, err)
	}
	if err := claims.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return fmt.Errorf("delete claim %s: %w", name, err)
	}
	return nil
}

// startScheduler runs the cluster's kube-scheduler on this host.
func (s *scheduling) startScheduler(ctx context.Context) (pid int, stop func(), err error) {
	return startScheduler(ctx, s.cluster.Binary("kube-scheduler"), s.cluster.KubeconfigPath(), s.cluster.Dir())
}

// startScheduler runs a kube-scheduler, which logs into a file of dir.
func startScheduler(ctx context.Context, program, kubeconfig, dir string) (pid int, stop func(), err error) {
	log, err := os.Create(filepath.Join(dir, "bench-scheduler.log"))
	if err != nil {
		return 0, nil, fmt.Errorf("start a scheduler: %w", err)
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, program, "--kubeconfig="+kubeconfig,
		"--leader-elect=false", "--secure-port=0", "--kube-api-qps=2000", "--kube-api-burst=2000")
	cmd.Stderr = log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if err := cmd.Start(); err != nil {
		return 0, nil, fmt.Errorf("start a scheduler: %w", err)
	}
	return cmd.Process.Pid, func() {
		_ = cmd.Process.Kill() // it has nothing to tidy up
		_ = cmd.Wait()
	}, nil
}

// processorTime returns the CPU time of a process with all its threads, in
// steps of 10 ms.
func processorTime(pid int) (time.Duration, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, fmt.Errorf("read processor time: %w", err)
	}
	// After the name, which may have anything in it: state is field 3, user and
	// system time are 14 and 15.
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	var ticks int
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(f)
		if err != nil {
			return 0, fmt.Errorf("read processor time of process %d: %w", pid, err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}
