//go:build integration

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/prepare/failpoint"
	"github.com/tessera-dra/tessera/pkg/node/prepare/preparetest"
	"github.com/tessera-dra/tessera/test/cluster"
)

const (
	driver   = "gpu.nvidia.com"
	nodeName = "node-a"
	// patience is how long a plugin may take to register or to die.
	patience = 60 * time.Second
)

var (
	api        kubernetes.Interface
	kubeconfig string
	program    string
	host       nodetest.Driver
)

// TestMain has a real API server, the real plugin built with failpoints, and a
// simulated driver of two GPUs.
func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "crash-")
	if err != nil {
		return fail(err)
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "kubelet-plugin")
	build := exec.Command("go", "build", "-tags", "failpoints", "-o", program, "../../cmd/kubelet-plugin")
	if out, err := build.CombinedOutput(); err != nil {
		return fail(fmt.Errorf("build the plugin: %w\n%s", err, out))
	}
	stop, err := startAPI(dir)
	if err != nil {
		return fail(err)
	}
	defer stop()
	return nodetest.Run(m, "2xh100-80gb", func(d nodetest.Driver) { host = d })
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "crash tests:", err)
	return 1
}

// startAPI starts etcd and kube-apiserver, with a Node for the plugin.
func startAPI(dir string) (stop func(), _ error) {
	binaries := os.Getenv("KUBEBUILDER_ASSETS")
	if binaries == "" {
		binaries = filepath.Join(dir, "bin")
		if err := cluster.Build(context.Background(), "1.37", binaries, os.Stderr); err != nil {
			return nil, fmt.Errorf("get kube-apiserver and etcd: %w", err)
		}
	}
	env := envtest.Environment{
		BinaryAssetsDirectory: binaries,
		CRDDirectoryPaths:     []string{"../../deployments/helm/tessera/files/crds"},
		ErrorIfCRDPathMissing: true,
	}
	log.SetLogger(klog.Background())
	config, err := env.Start()
	if err != nil {
		return nil, fmt.Errorf("start kube-apiserver and etcd of %s: %w", binaries, err)
	}
	stop = func() { _ = env.Stop() }
	kubeconfig = filepath.Join(dir, "kubeconfig")
	if err = os.WriteFile(kubeconfig, env.KubeConfig, 0o600); err == nil {
		api, err = kubernetes.NewForConfig(config)
	}
	if err == nil {
		_, err = api.CoreV1().Nodes().Create(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	}
	if err != nil {
		stop()
	}
	return stop, err
}

// node is the kubelet's side of one node, which plugins come and go on.
type node struct {
	preparetest.State
	kubelet, data string
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") //nolint:usetesting // t.TempDir has the test's name in it, too long for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{kubelet: filepath.Join(dir, "kubelet"), data: filepath.Join(dir, "data")}
	n.State = preparetest.State{Journal: filepath.Join(n.data, "claims"), CDI: filepath.Join(dir, "cdi"), Root: host.Host}
	for _, d := range []string{filepath.Join(n.kubelet, "plugins_registry"), n.CDI} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// plugin is one process.
type plugin struct {
	cmd  *exec.Cmd
	log  string
	done chan struct{} // closed when it is dead
	dra  drapbv1.DRAPluginClient
}

// start starts a plugin that dies after the step, or never if it is empty.
func (n *node) start(t *testing.T, step string) *plugin {
	t.Helper()
	out, err := os.CreateTemp(t.TempDir(), "log")
	if err != nil {
		t.Fatal(err)
	}
	p := &plugin{log: out.Name(), done: make(chan struct{}), cmd: exec.Command(program, "--node-name", nodeName, "--kubeconfig", kubeconfig,
		"--host-root", host.Host, "--driver-root", host.Root, "--kubelet-root", n.kubelet, "--data-dir", n.data,
		"--cdi-dir", n.CDI, "--cdi-hook", "/bin/true", "--metrics-address", "", "-v", "4")}
	p.cmd.Env = append(os.Environ(), failpoint.Variable+"="+step)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			said, _ := os.ReadFile(p.log)
			t.Logf("the plugin that dies after %q:\n%s", step, said)
		}
		out.Close()
	})
	return p
}

func (p *plugin) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// waitLog waits until the plugin has said something.
func (p *plugin) waitLog(t *testing.T, what string) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		out, err := os.ReadFile(p.log)
		return strings.Contains(string(out), what), err
	})
	if err != nil {
		t.Fatalf("the plugin never said %q: %v", what, err)
	}
}

// waitDead waits until the plugin has killed itself.
func (p *plugin) waitDead(t *testing.T) {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		t.Fatal("the plugin did not come to the step")
	}
	if s, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || s.Signal() != syscall.SIGKILL {
		t.Fatalf("the plugin ended with %v, not at the step", p.cmd.ProcessState)
	}
}

// register does what the kubelet does when the plugin's socket appears.
func (n *node) register(t *testing.T, p *plugin) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	go func() {
		select {
		case <-p.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	c := registerapi.NewRegistrationClient(dial(t, filepath.Join(n.kubelet, "plugins_registry", driver+"-reg.sock")))
	info, err := c.GetInfo(ctx, &registerapi.InfoRequest{})
	if err == nil {
		_, err = c.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true})
	}
	if err != nil {
		t.Fatalf("register the plugin: %v", err)
	}
	p.dra = drapbv1.NewDRAPluginClient(dial(t, info.GetEndpoint()))
}

func dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	backoff := grpc.ConnectParams{MinConnectTimeout: time.Second}
	backoff.Backoff.BaseDelay, backoff.Backoff.MaxDelay, backoff.Backoff.Multiplier = 20*time.Millisecond, 100*time.Millisecond, 1.5
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(backoff), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// newClaim is a claim that the scheduler has given the GPUs.
func newClaim(t *testing.T, gpus ...string) *resourceapi.ResourceClaim {
	t.Helper()
	claims := api.ResourceV1().ResourceClaims("default")
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{GenerateName: "claim-"}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: driver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(len(gpus)),
	}}}
	c, err := claims.Create(t.Context(), c, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, d := range gpus {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: driver, Pool: nodeName, Device: d})
	}
	if c, err = claims.UpdateStatus(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return c
}

func reference(c *resourceapi.ResourceClaim) []*drapbv1.Claim {
	return []*drapbv1.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
}

// prepare returns the names of the devices.
func (p *plugin) prepare(t *testing.T, c *resourceapi.ResourceClaim) ([]string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := p.dra.NodePrepareResources(ctx, &drapbv1.NodePrepareResourcesRequest{Claims: reference(c)}, grpc.WaitForReady(false))
	if err != nil {
		return nil, err
	}
	one := resp.GetClaims()[string(c.UID)]
	if one.GetError() != "" {
		return nil, errors.New(one.GetError())
	}
	var names []string
	for _, d := range one.GetDevices() {
		names = append(names, d.GetDeviceName())
	}
	return names, nil
}

func (p *plugin) unprepare(t *testing.T, c *resourceapi.ResourceClaim) error {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := p.dra.NodeUnprepareResources(ctx, &drapbv1.NodeUnprepareResourcesRequest{Claims: reference(c)}, grpc.WaitForReady(false))
	if err == nil && resp.GetClaims()[string(c.UID)].GetError() != "" {
		err = errors.New(resp.GetClaims()[string(c.UID)].GetError())
	}
	return err
}

func (p *plugin) mustPrepare(t *testing.T, c *resourceapi.ResourceClaim) {
	t.Helper()
	names, err := p.prepare(t, c)
	if err != nil {
		t.Fatalf("prepare: %v", err)
	}
	var want []string
	for _, r := range c.Status.Allocation.Devices.Results {
		want = append(want, r.Device)
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("prepared devices (-want +got):\n%s", diff)
	}
}

func (p *plugin) mustUnprepare(t *testing.T, c *resourceapi.ResourceClaim) {
	t.Helper()
	if err := p.unprepare(t, c); err != nil {
		t.Fatalf("unprepare: %v", err)
	}
}

func (n *node) check(t *testing.T, when string) {
	t.Helper()
	if err := preparetest.Check(n.State); err != nil {
		t.Errorf("invariants %s: %v", when, err)
	}
}

// checkEmpty wants no claim left in the journal or the CDI directory.
func (n *node) checkEmpty(t *testing.T) {
	t.Helper()
	n.check(t, "at the end")
	for _, pattern := range []string{filepath.Join(n.Journal, "*"), filepath.Join(n.CDI, "*claim_*")} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left over: %v", left)
		}
	}
}

func (n *node) wipeCDI(t *testing.T) {
	t.Helper()
	if err := errors.Join(os.RemoveAll(n.CDI), os.Mkdir(n.CDI, 0o755)); err != nil {
		t.Fatal(err)
	}
}

func names(t *testing.T) []string {
	t.Helper()
	var gpus []gpu.GPU
	for _, g := range host.Machine.GPUs {
		gpus = append(gpus, gpu.GPU{UUID: gpu.UUID(g.UUID)})
	}
	all, err := gpu.NewNames(gpus)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, g := range gpus {
		name, _ := all.Name(gpu.Whole{GPU: g.UUID})
		list = append(list, string(name))
	}
	return list
}

// TestPluginDies kills the plugin after each step of a prepare, an unprepare
// and a recovery, as kill -9 does, with and without the CDI directory wiped
// meanwhile; starts it again and asserts the invariants, then has the kubelet
// try again what it got no answer to.
func TestPluginDies(t *testing.T) {
	put := []string{"journal.put.created", "journal.put.written", "journal.put.synced", "journal.put.renamed", "journal.put.durable"}
	for name, op := range map[string]struct {
		steps []string
		// before is done by a plugin that lives, do by one that dies.
		before, do func(*testing.T, *node, *plugin, *resourceapi.ResourceClaim)
	}{
		"prepare": {
			steps:  append(slices.Clone(put), "prepare.locked", "prepare.recorded", "prepare.written"),
			before: func(*testing.T, *node, *plugin, *resourceapi.ResourceClaim) {},
			do: func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) {
				n.register(t, p)
				if names, err := p.prepare(t, c); err == nil {
					t.Errorf("prepared: %v", names)
				}
			},
		},
		"unprepare": {
			steps:  []string{"unprepare.removed", "journal.delete.unlinked", "journal.delete.durable", "unprepare.forgotten"},
			before: func(t *testing.T, _ *node, p *plugin, c *resourceapi.ResourceClaim) { p.mustPrepare(t, c) },
			do: func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) {
				n.register(t, p)
				if err := p.unprepare(t, c); err == nil {
					t.Error("unprepared")
				}
			},
		},
		"recover": {
			steps: []string{"recover.written"},
			before: func(t *testing.T, n *node, p *plugin, c *resourceapi.ResourceClaim) {
				p.mustPrepare(t, c)
				n.wipeCDI(t)
			},
			do: func(*testing.T, *node, *plugin, *resourceapi.ResourceClaim) {}, // it dies by itself
		},
	} {
		for _, step := range op.steps {
			for wiped, wipe := range map[string]func(*node){"": func(*node) {}, ", CDI wiped": func(n *node) { n.wipeCDI(t) }} {
				t.Run(name+"/"+step+wiped, func(t *testing.T) {
					n, gpus := newNode(t), names(t)
					other, c := newClaim(t, gpus[0]), newClaim(t, gpus[1])
					p := n.start(t, "")
					n.register(t, p)
					if name != "recover" { // there, the first claim restored is c
						p.mustPrepare(t, other)
					}
					op.before(t, n, p, c)
					p.kill()

					p = n.start(t, step)
					op.do(t, n, p, c)
					p.waitDead(t)
					wipe(n)

					p = n.start(t, "")
					n.register(t, p)
					n.check(t, "after recovery")
					p.mustPrepare(t, c)
					n.check(t, "after a prepare")
					p.mustUnprepare(t, c)
					p.mustPrepare(t, c)
					p.mustUnprepare(t, other)
					p.mustUnprepare(t, c)
					n.checkEmpty(t)
				})
			}
		}
	}
}

// TestHandover has a claim's GPU wanted by another as soon as the claim is
// deleted, before the kubelet has unprepared it.
func TestHandover(t *testing.T) {
	n, gpus := newNode(t), names(t)
	p := n.start(t, "")
	n.register(t, p)
	old, anew := newClaim(t, gpus[0]), newClaim(t, gpus[0])
	p.mustPrepare(t, old)

	old.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "trainer", UID: "1"}}
	if _, err := api.ResourceV1().ResourceClaims("default").UpdateStatus(t.Context(), old, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "trainer"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	pod, err := api.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	current, err := api.ResourceV1().ResourceClaims("default").Get(t.Context(), old.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	current.Status.ReservedFor[0].UID = pod.UID
	if _, err := api.ResourceV1().ResourceClaims("default").UpdateStatus(t.Context(), current, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.prepare(t, anew); err == nil || !strings.Contains(err.Error(), "pod default/trainer uses it") {
		t.Errorf("while the pod lives: got %v, want a refusal that names it", err)
	}

	now := int64(0)
	if err := api.CoreV1().Pods("default").Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	prepared := make(chan error, 1)
	go func() {
		_, err := p.prepare(t, anew)
		prepared <- err
	}()
	p.waitLog(t, "Waiting for a claim to release its devices")
	released := time.Now()
	p.mustUnprepare(t, old)
	if err := <-prepared; err != nil {
		t.Errorf("after the pod is gone: %v", err)
	}
	t.Logf("prepared %s after the release began", time.Since(released))
	n.check(t, "after the handover")
}

// TestJournalUnreadable damages a record between two plugins.
func TestJournalUnreadable(t *testing.T) {
	n, gpus := newNode(t), names(t)
	p := n.start(t, "")
	n.register(t, p)
	broken, good := newClaim(t, gpus[0]), newClaim(t, gpus[1])
	p.mustPrepare(t, broken)
	p.mustPrepare(t, good)
	p.kill()
	if err := os.Truncate(filepath.Join(n.Journal, string(broken.UID)+".json"), 40); err != nil {
		t.Fatal(err)
	}
	p = n.start(t, "")
	n.register(t, p)
	p.mustPrepare(t, good)
	if specs, _ := filepath.Glob(filepath.Join(n.CDI, "*claim_*")); len(specs) != 2 {
		t.Errorf("CDI specs: %v, want those of both claims", specs)
	}
	p.mustUnprepare(t, broken)
	p.mustUnprepare(t, good)
	n.checkEmpty(t)
}
