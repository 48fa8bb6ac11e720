//go:build integration

package control_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/test/apiserver"
)

// patience is the time limit for expected events. Durations are in the log and
// not checked.
const patience = 20 * time.Second

var (
	api        client.WithWatch
	slices     resourceclient.ResourceSliceInterface
	claims     resourceclient.ResourceClaimInterface
	program    string
	binaries   string // directory of kube-apiserver and etcd
	kubeconfig string
)

// TestMain runs the stories on a real API server and etcd, with the real
// controller program as a process of its own. KUBEBUILDER_ASSETS names a
// directory with the two, RESOURCE_API the version of resource.k8s.io that the
// server has, if it isn't to be v1.
func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "control stories:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "control-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binaries = filepath.Join(dir, "bin")
	if err := errors.Join(os.Mkdir(binaries, 0o755), apiserver.Binaries(context.Background(), binaries, os.Stderr)); err != nil {
		return 0, fmt.Errorf("get kube-apiserver and etcd: %w", err)
	}
	program = filepath.Join(dir, "controller")
	if out, err := exec.Command("go", "build", "-o", program, "../../cmd/controller").CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the controller: %w\n%s", err, out)
	}
	if err := v1alpha1.AddToScheme(scheme.Scheme); err != nil {
		return 0, err
	}
	stop, err := serve(dir, binaries, os.Getenv("RESOURCE_API"))
	if err != nil {
		return 0, err
	}
	defer stop()
	return m.Run(), nil
}

// serve starts an API server that has only this version of resource.k8s.io,
// or, if it is empty, v1 and whatever is on by default. From now on stories are
// told to it.
func serve(dir, binaries, version string, args ...string) (stop func(), err error) {
	env := envtest.Environment{
		CRDDirectoryPaths:     []string{"../../deployments/helm/tessera/files/crds"},
		ErrorIfCRDPathMissing: true,
	}
	flags := env.ControlPlane.GetAPIServer().Configure()
	if version != "" && version != "v1" {
		flags.Append("runtime-config", "resource.k8s.io/v1=false,resource.k8s.io/"+version+"=true")
	}
	for _, arg := range args {
		name, value, _ := strings.Cut(arg, "=")
		flags.Append(name, value)
	}
	config, err := apiserver.Start(&env, binaries)
	if err != nil {
		return nil, err
	}
	stop = func() { _ = env.Stop() }
	if err := connect(dir, env.KubeConfig, config); err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}

// connect makes the clients that stories use.
func connect(dir string, file []byte, config *rest.Config) (err error) {
	kubeconfig = filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, file, 0o600); err != nil {
		return err
	}
	if api, err = client.NewWithWatch(config, client.Options{Scheme: scheme.Scheme}); err != nil {
		return err
	}
	clientset, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	slices = draclient.New(clientset).ResourceSlices()
	claims = draclient.New(clientset).ResourceClaims("default")
	return nil
}

// anotherServer runs the rest of this story with another API server.
func anotherServer(t *testing.T, version string, args ...string) {
	t.Helper()
	api0, slices0, claims0, kubeconfig0 := api, slices, claims, kubeconfig
	stop, err := serve(t.TempDir(), binaries, version, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		api, slices, claims, kubeconfig = api0, slices0, claims0, kubeconfig0
	})
}

func TestFirstPublish(t *testing.T) {
	startController(t)
	n := newNode(t, 8)
	n.report(t)
	n.startPlugin(t)
	got := n.waitForPool(t, 8)

	var devices []string
	for i, s := range got {
		if s.Spec.NodeName == nil || *s.Spec.NodeName != n.name || s.Spec.Pool.Name != n.name || s.Spec.Pool.Generation != 1 {
			t.Errorf("slice %s: node %v, pool %+v", s.Name, s.Spec.NodeName, s.Spec.Pool)
		}
		want := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.name, UID: n.uid, Controller: new(true)}}
		if diff := cmp.Diff(want, s.OwnerReferences); diff != "" {
			t.Errorf("slice %s: owner (-want +got):\n%s", s.Name, diff)
		}
		if index := s.Spec.Devices[0].Attributes["index"].IntValue; index == nil || *index != int64(i) {
			t.Errorf("slice %d by name holds GPU %v", i, index)
		}
		devices = append(devices, s.Spec.Devices[0].Name)
	}
	want := []string{"gpu-00000000", "gpu-00000001", "gpu-00000002", "gpu-00000003", "gpu-00000004", "gpu-00000005", "gpu-00000006", "gpu-00000007"}
	if diff := cmp.Diff(want, devices); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// The kubelet hasn't registered the plugin: pods would hang.
func TestNothingIsPublishedBeforeRegistration(t *testing.T) {
	startController(t)
	n := newNode(t, 2)
	n.status.RegisteredAt = nil
	n.report(t)
	somethingElseHappens(t)
	n.mustHaveNoSlices(t)
	if r := n.inventory(t).Spec.PublishRequest; r != 0 {
		t.Errorf("a plugin that isn't registered was asked (request %d)", r)
	}
}

func TestRestartWritesNothing(t *testing.T) {
	stop := startController(t)
	n := newNode(t, 8)
	n.report(t)
	n.startPlugin(t)
	before := versions(n.waitForPool(t, 8), n.inventory(t))
	stop()
	startController(t)
	somethingElseHappens(t)
	if diff := cmp.Diff(before, versions(n.pool(t), n.inventory(t))); diff != "" {
		t.Errorf("written on restart (-before +after):\n%s", diff)
	}
}

// The kubelet deletes the slices when it starts, and the plugin runs.
func TestWipedPoolComesBackWithALivingPlugin(t *testing.T) {
	startController(t)
	n := newNode(t, 8)
	n.report(t)
	n.startPlugin(t)
	old := versions(n.waitForPool(t, 8))
	asked := n.inventory(t).Spec.PublishRequest

	begun := time.Now()
	n.wipe(t)
	eventually(t, "the pool is published again", func() bool {
		now := n.pool(t)
		for _, s := range now {
			if _, ok := old[string(s.UID)]; ok {
				return false
			}
		}
		return len(now) == 8
	})
	t.Logf("back %s after the wipe; %d more requests", time.Since(begun).Round(time.Millisecond), n.inventory(t).Spec.PublishRequest-asked)
}

func TestOneSliceDeletedTakesThePoolAwayUntilThePluginAnswers(t *testing.T) {
	startController(t)
	n := newNode(t, 8)
	n.report(t)
	kill := n.startPlugin(t)
	pool := n.waitForPool(t, 8)
	asked := n.inventory(t).Spec.PublishRequest
	kill()

	if err := slices.Delete(t.Context(), pool[3].Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the rest is withdrawn and the plugin asked", func() bool {
		return len(n.pool(t)) == 0 && n.inventory(t).Spec.PublishRequest > asked
	})
	n.startPlugin(t)
	n.waitForPool(t, 8)
	if got := n.inventory(t).Spec.PublishRequest; got != asked+1 {
		t.Errorf("asked %d times", got-asked)
	}
}

func TestDeadPluginStaysAway(t *testing.T) {
	stop := startController(t)
	n := newNode(t, 8)
	n.report(t)
	kill := n.startPlugin(t)
	n.waitForPool(t, 8)
	asked := n.inventory(t).Spec.PublishRequest
	kill()
	n.wipe(t)
	eventually(t, "the plugin is asked", func() bool { return n.inventory(t).Spec.PublishRequest > asked })
	somethingElseHappens(t)
	n.mustHaveNoSlices(t)
	if got := n.inventory(t).Spec.PublishRequest; got != asked+1 {
		t.Errorf("the burst of deletions made %d requests, want 1", got-asked)
	}

	stop()
	startController(t)
	somethingElseHappens(t)
	n.mustHaveNoSlices(t)

	n.startPlugin(t)
	n.waitForPool(t, 8)
}

// The kubelet wipes while no controller runs: the next one must not take an
// old answer for a new one.
func TestWipeDuringControllerDowntime(t *testing.T) {
	stop := startController(t)
	n := newNode(t, 4)
	n.report(t)
	kill := n.startPlugin(t)
	n.waitForPool(t, 4)
	stop()
	kill()
	n.wipe(t)
	startController(t)
	somethingElseHappens(t)
	n.mustHaveNoSlices(t)
	n.startPlugin(t)
	n.waitForPool(t, 4)
}

func TestLostGPUGoesAndComesBack(t *testing.T) {
	startController(t)
	n := newNode(t, 8)
	n.report(t)
	n.startPlugin(t)
	before := n.waitForPool(t, 8)
	asked := n.inventory(t).Spec.PublishRequest

	n.facts.GPUs[2].Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "fell off the bus"}}
	n.report(t)
	for _, s := range n.waitForPool(t, 7) {
		if s.Name == before[2].Name {
			t.Errorf("slice %s of the lost GPU is there", s.Name)
		}
		if s.Spec.Pool.Generation != 2 {
			t.Errorf("slice %s: generation %d, want 2", s.Name, s.Spec.Pool.Generation)
		}
	}
	n.facts.GPUs[2].Conditions = nil
	n.report(t)
	n.waitForPool(t, 8)
	if got := n.inventory(t).Spec.PublishRequest; got != asked {
		t.Errorf("a change of facts asked the plugin %d times", got-asked)
	}
}

// A node whose slices can't be written must not keep others from theirs.
func TestNodesAreIndependent(t *testing.T) {
	startController(t)
	bad, good := newNode(t, 2), newNode(t, 2)
	squatter := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: bad.name + "-000-gpu-00000000"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "other.example.com", NodeName: new("elsewhere"),
			Pool: resourceapi.ResourcePool{Name: "elsewhere", ResourceSliceCount: 1},
		},
	}
	createSlice(t, squatter)
	bad.report(t)
	bad.startPlugin(t)
	good.report(t)
	good.startPlugin(t)
	good.waitForPool(t, 2)
	if err := slices.Delete(t.Context(), squatter.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	bad.waitForPool(t, 2)
}

// Another driver of the same name keeps its slices on nodes that this one
// doesn't serve.
func TestForeignSlicesAreLeftAlone(t *testing.T) {
	n := newNode(t, 1)
	foreign := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: n.name + "-foreign"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: &n.name,
			Pool: resourceapi.ResourcePool{Name: "theirs", ResourceSliceCount: 1},
		},
	}
	createSlice(t, foreign)
	startController(t)
	somethingElseHappens(t)
	if _, err := slices.Get(t.Context(), foreign.Name, metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
}

func TestInventoryDeletedTakesTheSlicesAlong(t *testing.T) {
	startController(t)
	n := newNode(t, 3)
	n.report(t)
	kill := n.startPlugin(t)
	n.waitForPool(t, 3)
	kill()
	if err := api.Delete(t.Context(), n.inventory(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the slices are gone", func() bool { return len(n.pool(t)) == 0 })

	n.report(t) // the plugin creates it again
	n.startPlugin(t)
	n.waitForPool(t, 3)
}

func TestOrphansGoWhenTheControllerStarts(t *testing.T) {
	stop := startController(t)
	n := newNode(t, 2)
	n.report(t)
	kill := n.startPlugin(t)
	n.waitForPool(t, 2)
	stop()
	kill()
	if err := api.Delete(t.Context(), n.inventory(t)); err != nil {
		t.Fatal(err)
	}
	startController(t)
	eventually(t, "the slices are gone", func() bool { return len(n.pool(t)) == 0 })
}

// node is a node with its plugin, as far as the controller can tell.
type node struct {
	name   string
	uid    types.UID
	facts  gpu.Node
	status v1alpha1.GPUInventoryStatus
}

func newNode(t *testing.T, gpus int) *node {
	t.Helper()
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: "node-"}}
	if err := api.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	n := &node{name: object.Name, uid: object.UID, facts: gpu.Node{Name: object.Name, DriverVersion: "580.159.04", CUDADriverVersion: "13.0"}}
	n.status.RegisteredAt = new(metav1.NowMicro())
	for i := range gpus {
		n.facts.GPUs = append(n.facts.GPUs, gpu.GPU{
			UUID: gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-%012x", i, i)), Index: i, Minor: i,
			PCI:         gpu.PCIAddress(fmt.Sprintf("0000:%02x:00.0", i)),
			Model:       gpu.Model{ProductName: "NVIDIA H100 80GB HBM3", Brand: "Nvidia", Architecture: "Hopper", CUDAComputeCapability: "9.0"},
			MemoryBytes: 81559 << 20,
		})
	}
	t.Cleanup(func() {
		_ = api.Delete(context.Background(), object)
		_ = api.Delete(context.Background(), &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: n.name}})
		_ = slices.DeleteCollection(context.Background(), metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
	})
	return n
}

// report writes the inventory as the plugin does.
func (n *node) report(t *testing.T) {
	t.Helper()
	inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{
		Name:            n.name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.name, UID: n.uid}},
	}}
	if err := api.Create(t.Context(), inv); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	eventually(t, "the report is stored", func() bool {
		inv := n.inventory(t)
		response := inv.Status.PublishResponse
		inv.Status = n.status
		inv.Status.PublishResponse = response
		inventory.SetFacts(&inv.Status, n.facts)
		return api.Status().Update(t.Context(), inv) == nil
	})
}

func (n *node) inventory(t *testing.T) *v1alpha1.GPUInventory {
	t.Helper()
	inv := &v1alpha1.GPUInventory{}
	if err := api.Get(t.Context(), types.NamespacedName{Name: n.name}, inv); err != nil {
		t.Fatal(err)
	}
	return inv
}

// startPlugin answers publishRequests until it is killed or the test ends.
func (n *node) startPlugin(t *testing.T) (kill func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w, err := api.Watch(ctx, &v1alpha1.GPUInventoryList{}, client.MatchingFields{"metadata.name": n.name})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range w.ResultChan() {
			inv, ok := e.Object.(*v1alpha1.GPUInventory)
			if !ok || inv.Status.PublishResponse >= inv.Spec.PublishRequest {
				continue
			}
			base := inv.DeepCopy()
			inv.Status.PublishResponse = inv.Spec.PublishRequest
			if err := api.Status().Patch(ctx, inv, client.MergeFrom(base)); err != nil && ctx.Err() == nil {
				t.Errorf("plugin: %v", err)
			}
		}
	}()
	kill = func() { cancel(); w.Stop(); <-done }
	t.Cleanup(kill)
	return kill
}

// wipe deletes the node's slices the way the kubelet does.
func (n *node) wipe(t *testing.T) {
	t.Helper()
	err := slices.DeleteCollection(t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{FieldSelector: "spec.driver=gpu.nvidia.com,spec.nodeName=" + n.name})
	if err != nil {
		t.Fatal(err)
	}
}

func (n *node) pool(t *testing.T) []resourceapi.ResourceSlice {
	t.Helper()
	list, err := slices.List(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// waitForPool waits for a complete pool of so many slices.
func (n *node) waitForPool(t *testing.T, size int) []resourceapi.ResourceSlice {
	t.Helper()
	var pool []resourceapi.ResourceSlice
	begun := time.Now()
	eventually(t, fmt.Sprintf("%s has a pool of %d", n.name, size), func() bool {
		pool = n.pool(t)
		for _, s := range pool {
			if s.Spec.Pool.ResourceSliceCount != int64(size) || s.Spec.Pool.Generation != pool[0].Spec.Pool.Generation {
				return false
			}
		}
		return len(pool) == size
	})
	t.Logf("%s: a pool of %d after %s", n.name, size, time.Since(begun).Round(time.Millisecond))
	return pool
}

func (n *node) mustHaveNoSlices(t *testing.T) {
	t.Helper()
	if pool := n.pool(t); len(pool) > 0 {
		t.Errorf("%s has %d slices", n.name, len(pool))
	}
}

// somethingElseHappens has another node published from scratch: by then the
// controller has looked at everything that was there before.
func somethingElseHappens(t *testing.T) {
	t.Helper()
	n := newNode(t, 1)
	n.report(t)
	n.startPlugin(t)
	n.waitForPool(t, 1)
}

func createSlice(t *testing.T, s *resourceapi.ResourceSlice) {
	t.Helper()
	if _, err := slices.Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = slices.Delete(context.Background(), s.Name, metav1.DeleteOptions{}) })
}

func versions(pool []resourceapi.ResourceSlice, inventories ...*v1alpha1.GPUInventory) map[string]string {
	out := make(map[string]string)
	for _, s := range pool {
		out[string(s.UID)] = s.Name + " " + s.ResourceVersion
	}
	for _, i := range inventories {
		out[string(i.UID)] = i.Name + " " + i.ResourceVersion
	}
	return out
}

// controllerLog returns the log of the controller that was started last.
var controllerLog func() string

// safeBuffer can be read while it is written to.
type safeBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

// startController runs the program until stop, which is also how it ends with
// the test: by SIGTERM, without an error.
func startController(t *testing.T, flags ...string) (stop func()) {
	t.Helper()
	log := &safeBuffer{}
	controllerLog = log.String
	cmd := exec.Command(program, append([]string{"--kubeconfig", kubeconfig, "--namespace", "default", "--metrics-address", "0", "-v", "2"}, flags...)...)
	cmd.Stdout, cmd.Stderr = io.Discard, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		t.Logf("the controller holds %s", residentMemory(cmd.Process.Pid))
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Errorf("stop the controller: %v", err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("the controller ended with %v", err)
		}
		if t.Failed() {
			t.Logf("controller:\n%s", log.String())
		}
	}
	t.Cleanup(stop)
	return stop
}

func residentMemory(pid int) string {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s: %s", patience, what)
		}
		select {
		case <-t.Context().Done():
			t.FailNow()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// The lease is released, so that the next controller doesn't wait for its
// expiry.
func TestAnotherControllerTakesOver(t *testing.T) {
	stop := startController(t)
	n := newNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	n.waitForPool(t, 2)
	startController(t) // waits
	stop()
	begun := time.Now()
	somethingElseHappens(t)
	t.Logf("the next controller had published a node %s after the last one's end", time.Since(begun).Round(time.Millisecond))
}

func TestPolicyIsAnswered(t *testing.T) {
	startController(t)
	n := newNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	p := newPolicy(t, v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}})
	p.Spec.GPUSelector = "1 + 1"
	p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/hostname": n.name}}
	if err := api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	answer := func() string {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
			t.Fatal(err)
		}
		for _, c := range p.Status.Conditions {
			if c.Type == v1alpha1.ConditionAccepted && c.ObservedGeneration == p.Generation {
				return fmt.Sprintf("%s %s nodes=%d gpus=%d", c.Status, c.Reason, p.Status.Nodes, p.Status.GPUs)
			}
		}
		return ""
	}
	eventually(t, "the selector is refused", func() bool { return answer() == "False Invalid nodes=0 gpus=0" })

	change(t, p, func() { p.Spec.GPUSelector = "" })
	eventually(t, "the plan is in force, nowhere yet", func() bool { return answer() == "True Accepted nodes=0 gpus=0" })

	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
		t.Fatal(err)
	}
	object.Labels = map[string]string{"kubernetes.io/hostname": n.name}
	if err := api.Update(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node's label is noticed", func() bool { return answer() == "True Accepted nodes=1 gpus=2" })
	change(t, p, func() { p.Spec.GPUSelector = "1 + 1" })
	eventually(t, "what was accepted stays in force", func() bool { return answer() == "False Invalid nodes=1 gpus=2" })
}

// The server itself refuses what makes no sense.
func TestServerRefusesMalformedPolicies(t *testing.T) {
	exclusive := &v1alpha1.ExclusivePlan{}
	for name, plan := range map[string]v1alpha1.Plan{
		"none":             {},
		"two":              {Exclusive: exclusive, TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}},
		"mps without form": {MPS: &v1alpha1.MPSPlan{}},
		"mps in two forms": {MPS: &v1alpha1.MPSPlan{Shares: ptr.To[int32](2), Consumable: &v1alpha1.ConsumableMPS{}}},
		"one replica":      {TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 1}},
		"half a suffix":    {Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.24gb+"}}},
		"twice":            {Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.24gb", "1g.24gb"}}},
		"no profile":       {Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"small"}}},
		"both cuts":        {Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.10gb"}, Layout: []string{"1g.10gb"}}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := api.Create(t.Context(), newPolicy(t, plan)); !apierrors.IsInvalid(err) {
				t.Errorf("got %v, want the server to call it invalid", err)
			}
		})
	}
}

// One object that Go can't read would keep the controller from reading any: the
// server must not store it.
func TestServerRefusesWhatCannotBeRead(t *testing.T) {
	partitioned := func(keepWarm any) map[string]any {
		return map[string]any{"plan": map[string]any{"partitioned": map[string]any{"keepWarm": keepWarm}}}
	}
	consumable := func(memoryStep any) map[string]any {
		return map[string]any{"plan": map[string]any{"mps": map[string]any{"consumable": map[string]any{"memoryStep": memoryStep}}}}
	}
	told := func(keepWarm any) map[string]any {
		return map[string]any{"gpus": []any{map[string]any{"uuid": "GPU-1", "keepWarm": keepWarm}}}
	}
	create := func(t *testing.T, kind string, spec map[string]any) (string, error) {
		u := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
		u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
		u.SetGenerateName("odd-")
		err := api.Create(t.Context(), u)
		t.Cleanup(func() { _ = api.Delete(context.Background(), u) })
		return u.GetName(), err
	}
	for _, tc := range []struct {
		kind string
		spec func(any) map[string]any
		bad  []any
		good []any
	}{
		{"SharingPolicy", partitioned, []any{"1 minute", "60", "", "-1s", "9999999999h", int64(60)}, []any{"0", "0s", "1m30s", "1.5h", "250ms"}},
		{"GPUInventory", told, []any{"1 minute", "60", "", "-1s", "9999999999h", int64(60)}, []any{"0s", "1m30s"}},
		{"SharingPolicy", consumable, []any{"1e1.5", "1 Gi", "0", "-1Gi", int64(0)}, []any{"1Gi", "1.5Gi", "1e9", int64(1 << 30)}},
	} {
		for _, value := range tc.bad {
			if _, err := create(t, tc.kind, tc.spec(value)); !apierrors.IsInvalid(err) {
				t.Errorf("%s %v: got %v, want the server to call it invalid", tc.kind, tc.spec(value), err)
			}
		}
		for _, value := range tc.good {
			name, err := create(t, tc.kind, tc.spec(value))
			if err != nil {
				t.Errorf("%s %v: %v", tc.kind, tc.spec(value), err)
				continue
			}
			read := map[string]client.Object{"SharingPolicy": &v1alpha1.SharingPolicy{}, "GPUInventory": &v1alpha1.GPUInventory{}}[tc.kind]
			if err := api.Get(t.Context(), client.ObjectKey{Name: name}, read); err != nil {
				t.Errorf("%s %v: %v", tc.kind, tc.spec(value), err)
			}
		}
	}
}

func TestServerTakesTheProfilesThatThereAre(t *testing.T) {
	all := []string{"1g.5gb", "7g.141gb", "1g.10gb+me", "1g.24gb+me.all", "1g.24gb-me", "2g.48gb+gfx", "4g.96gb"}
	if err := api.Create(t.Context(), newPolicy(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: all}})); err != nil {
		t.Error(err)
	}
	if err := api.Create(t.Context(), newPolicy(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: append(all, "1g.5gb")}})); err != nil {
		t.Error(err)
	}
}

// The server sets the same defaults as SetDefaults.
func TestServerDefaults(t *testing.T) {
	for name, plan := range map[string]v1alpha1.Plan{
		"consumable":  {MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}},
		"time-sliced": {TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPolicy(t, plan)
			want := p.Spec.DeepCopy()
			want.SetDefaults()
			if err := api.Create(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(*want, p.Spec); diff != "" {
				t.Errorf("(-ours +the server's):\n%s", diff)
			}
		})
	}
}

func newPolicy(t *testing.T, plan v1alpha1.Plan) *v1alpha1.SharingPolicy {
	t.Helper()
	p := &v1alpha1.SharingPolicy{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "policy-"},
		Spec:       v1alpha1.SharingPolicySpec{Plan: plan},
	}
	t.Cleanup(func() {
		if p.Name != "" {
			_ = api.Delete(context.Background(), p)
		}
	})
	return p
}
