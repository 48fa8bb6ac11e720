package ranks

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	draclient "k8s.io/dynamic-resource-allocation/client"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/rank"
)

const pause = 10 * time.Second

// fleet is a cluster whose caches tests fill.
type fleet struct {
	t        testing.TB
	kube     *fake.Clientset
	api      client.WithWatch
	claims   controltest.Claims
	clock    *testingclock.FakeClock
	cluster  *Cluster
	slices   *publish.Publisher
	registry *prometheus.Registry
	ranker   *Ranker
	hard     int
	version  int // of all Nodes in the cache
}

// newFleet returns a cluster of nodes with so many GPUs each, called n0, n1 and so on, with 10 CPUs
// more each.
func newFleet(t testing.TB, gpus ...int) *fleet {
	t.Helper()
	f := &fleet{t: t, kube: fake.NewClientset(), claims: controltest.NewClaims(t), clock: testingclock.NewFakeClock(time.Unix(1000, 0))}
	dra := draclient.New(f.kube)
	store := clienttesting.ObjectReaction(f.kube.Tracker())
	f.kube.PrependReactor("patch", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
		handled, obj, err := store(a)
		if err != nil && !apierrors.IsNotFound(err) { // as the server says that a test failed
			err = apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "patch", corev1.Resource("nodes"), "", err.Error(), 0, false)
		}
		return handled, obj, err
	})
	var objects []client.Object
	for i, count := range gpus {
		name := fmt.Sprintf("n%d", i)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		node.Spec.Taints = []corev1.Taint{{Key: "theirs", Effect: corev1.TaintEffectPreferNoSchedule}}
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		node.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(int64(10+10*i), resource.DecimalSI)}
		if _, err := f.kube.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if count == 0 {
			continue
		}
		var all []v1alpha1.GPU
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{publish.ManagedByLabel: publish.ManagedBy}}}
		slice.Spec = resourceapi.ResourceSliceSpec{Driver: gpu.DriverName, NodeName: &name, Pool: resourceapi.ResourcePool{Name: name, ResourceSliceCount: 1}}
		for g := range count {
			all = append(all, controltest.L4(g))
			slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{Name: device(g)})
		}
		if _, err := dra.ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		objects = append(objects, controltest.NodeWith(name, "", all...)...)
	}
	f.api = controltest.NewAPI(t, objects...)
	publisher, err := publish.New(dra, f.kube.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	go publisher.Informer().RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), publisher.Informer().HasSynced) {
		t.Fatal("the slices aren't there")
	}
	f.slices = publisher
	f.restart()
	return f
}

// device is the name of a node's n-th GPU.
func device(n int) string { return fmt.Sprintf("gpu-%08x", n) }

// restart starts another controller.
func (f *fleet) restart() {
	f.t.Helper()
	cluster, err := Watch(f.kube, "")
	if err != nil {
		f.t.Fatal(err)
	}
	f.cluster, f.registry = cluster, prometheus.NewRegistry()
	f.ranker = New(Config{
		Options: Options{Pause: pause, Hard: f.hard}, Nodes: f.kube.CoreV1().Nodes(), Cache: f.api, Cluster: cluster,
		Inventories: kinds.NewInventoryReader(f.api, f.api, f.clock), Slices: f.slices, Claims: f.claims.Index, Writes: undone.New(f.clock),
		Metrics: f.registry, Clock: f.clock,
	})
}

// seen fills the cache of Nodes, and returns all ranks.
func (f *fleet) seen() string {
	f.t.Helper()
	list, err := f.kube.CoreV1().Nodes().List(f.t.Context(), metav1.ListOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	f.version++
	var all []any
	var out []string
	for i := range list.Items {
		n := &list.Items[i]
		n.ResourceVersion = fmt.Sprint(f.version)
		all = append(all, trimNode(n, ""))
		r := rank.Of(n.Spec.Taints)
		out = append(out, fmt.Sprintf("%d%s", r.Taints, map[bool]string{true: "h"}[r.Hard]))
		if len(n.Spec.Taints) == 0 || n.Spec.Taints[0].Key != "theirs" {
			f.t.Errorf("another's taint of %s is gone: %v", n.Name, n.Spec.Taints)
		}
	}
	if err := f.cluster.Nodes.GetStore().Replace(all, ""); err != nil {
		f.t.Fatal(err)
	}
	return strings.Join(out, " ")
}

// reconcile has the controller see all events, now and after so many seconds, and returns the
// ranks.
func (f *fleet) reconcile(seconds int) string {
	f.t.Helper()
	f.seen()
	f.clock.Step(time.Duration(seconds) * time.Second)
	for _, name := range append(f.cluster.Nodes.GetStore().ListKeys(), "gone") {
		if _, err := f.ranker.Reconcile(f.t.Context(), kinds.Request(name)); err != nil {
			f.t.Fatal(err)
		}
	}
	return f.seen()
}

func (f *fleet) must(when, want string, seconds int) {
	f.t.Helper()
	if diff := cmp.Diff(want, f.reconcile(seconds)); diff != "" {
		f.t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

// have says which claims there are: "n2:3" has three whole GPUs of n2.
func (f *fleet) have(text string) {
	f.t.Helper()
	var all []*resourceapi.ResourceClaim
	for i, word := range strings.Fields(text) {
		var node string
		var count int
		if _, err := fmt.Sscanf(strings.Replace(word, ":", " ", 1), "%s %d", &node, &count); err != nil {
			f.t.Fatal(err)
		}
		var names []string
		for g := range count {
			names = append(names, device(g))
		}
		claim := controltest.Claim(node, names...)
		claim.Name = fmt.Sprint(i)
		all = append(all, claim)
	}
	f.claims.Are(all...)
}

// writes counts the patches since the last call.
func (f *fleet) writes() int {
	n := 0
	for _, a := range f.kube.Actions() {
		if a.GetVerb() == "patch" {
			n++
		}
	}
	f.kube.ClearActions()
	return n
}

func TestRanks(t *testing.T) {
	f := newFleet(t, 8, 8, 8, 4, 0)
	f.must("a higher rank waits", "0 0 0 0 0", 0)
	f.must("nothing is used", "4 4 6 0 0", 10)
	if n := f.writes(); n != 3 {
		t.Errorf("%d writes, want 3", n)
	}
	f.have("n1:2 n3:4")
	f.must("a lower rank doesn't wait", "4 2 6 0 0", 0)
	f.have("n1:2 n2:8")
	f.must("one claim has the reserve", "4 2 6 0 0", 0)
	f.must("another one joins", "6 2 6 0 0", 10)
	f.restart()
	f.writes()
	f.must("another controller", "6 2 6 0 0", 0)
	f.must("nothing happens", "6 2 6 0 0", 3600)
	if n := f.writes(); n != 0 {
		t.Errorf("%d writes while nothing changes", n)
	}
	f.have("n0:1 n1:7 n2:1")
	f.must("small claims have the reserve", "2 0 2 0 0", 0)
	f.have("")
	f.must("all is given back", "2 0 2 0 0", 1)
	f.have("n0:1 n1:7 n2:1")
	f.must("and taken again before the pause is over", "2 0 2 0 0", 9)
	const want = "nodes_wholly_free gpus=4 pool= 1\nrank_writes_total 3\n"
	if diff := cmp.Diff(want, controltest.Metrics(t, f.registry)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestOneRequestComesAgain: while ranks wait, one request comes again when they are due, and not
// all that are seen meanwhile.
func TestOneRequestComesAgain(t *testing.T) {
	f := newFleet(t, 8, 8, 8, 8)
	f.seen()
	again := func(names ...string) (all []string) {
		for _, name := range names {
			result, err := f.ranker.Reconcile(t.Context(), kinds.Request(name))
			if err != nil {
				t.Fatal(err)
			}
			if result.RequeueAfter > 0 {
				all = append(all, fmt.Sprintf("%s in %s", name, result.RequeueAfter))
			}
		}
		return all
	}
	steps := []struct {
		what   string
		claims string
		after  time.Duration
		names  []string
		want   []string
	}{
		{"the first waits", "", 0, []string{"n1", "n0", "n2", "n3"}, []string{"n1 in 10s"}},
		{"an event of its own must not lose the time", "", time.Second, []string{"n0", "n1", "n2"}, []string{"n1 in 9s"}},
		{"it comes too early", "", 9*time.Second - time.Microsecond, []string{"n1"}, []string{"n1 in 1ms"}},
		{"all are written", "", time.Microsecond, []string{"n1"}, nil},
		{"two nodes are lowered", "n0:7 n1:7", 0, []string{"n0", "n1"}, nil},
		{"one of them is to be raised", "n1:7", 0, []string{"n0"}, []string{"n0 in 10s"}},
		{"the other one, too, but later", "", time.Second, []string{"n1"}, nil},
		{"the first is raised", "", 9 * time.Second, []string{"n0"}, []string{"n0 in 1s"}},
		{"the other one is raised", "", time.Second, []string{"n0"}, nil},
	}
	for _, s := range steps {
		f.have(s.claims)
		f.clock.Step(s.after)
		if diff := cmp.Diff(s.want, again(s.names...)); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", s.what, diff)
		}
		f.seen()
	}
	if diff := cmp.Diff("4 4 4 6", f.seen()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestHardReserve(t *testing.T) {
	f := newFleet(t, 8, 8, 8)
	f.hard = 1
	f.restart()
	f.reconcile(0)
	f.must("nothing is used", "4 4 6h", 10)
	f.have("n2:8")
	f.reconcile(0)
	f.must("one claim has it", "4 6h 6h", 10)
	f.have("")
	f.must("it is given back", "4 6 6h", 10)
	f.hard = 0
	f.restart()
	f.must("it is switched off", "4 6 6", 0)
}

// TestFreeCPU: what pods ask for decides which node joins the reserve, and no node leaves it for
// that.
func TestFreeCPU(t *testing.T) {
	f := newFleet(t, 8, 8)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{NodeName: "n1"}}
	cpu := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("15")}
	pod.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: cpu}}}
	small, err := trimPod(pod)
	if err != nil {
		t.Fatal(err)
	}
	handler := f.cluster.CPU.handler()
	handler.OnAdd(small, false)
	handler.OnUpdate(small, small)
	f.reconcile(0)
	f.must("n1 has 5 CPUs left, n0 10", "6 4", 10)
	handler.OnDelete(cache.DeletedFinalStateUnknown{Obj: small})
	f.must("the pod is gone", "6 4", 60)
	if n := f.cluster.CPU.used("n1"); n != 0 {
		t.Errorf("%d are used", n)
	}
}

// TestNodesThatAreAway keep their taints, and others take their place.
func TestNodesThatAreAway(t *testing.T) {
	for name, change := range map[string]func(*corev1.Node){
		"cordoned":  func(n *corev1.Node) { n.Spec.Unschedulable = true },
		"not ready": func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown },
		"scaled down": func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: leaving()[0], Effect: "NoSchedule"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, 8, 8, 8)
			f.reconcile(0)
			f.must("all are there", "4 4 6", 10)
			f.update("n2", change)
			f.reconcile(0)
			f.must("another one joins", "4 6 6", 10)
		})
	}
}

func (f *fleet) update(name string, change func(*corev1.Node)) {
	f.t.Helper()
	n, err := f.kube.CoreV1().Nodes().Get(f.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	change(n)
	if _, err := f.kube.CoreV1().Nodes().Update(f.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

// TestNodeWithoutInventory: the ranks of a node go with its GPUs, but not with the kind.
func TestNodeWithoutInventory(t *testing.T) {
	f := newFleet(t, 8, 8)
	f.reconcile(0)
	f.must("both are there", "4 6", 10)
	if err := f.api.Delete(t.Context(), &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}); err != nil {
		t.Fatal(err)
	}
	f.reconcile(0)
	f.must("n1 has no GPUs", "6 0", 10)
	controltest.Undefine(t, f.api, kinds.Inventories)
	if err := f.api.Delete(t.Context(), &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: "n0"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ranker.Reconcile(t.Context(), kinds.Request("n0")); err == nil {
		t.Error("ranks go with the kind")
	}
}

// TestTaintsThatHaveChanged: a write that doesn't know of another's new taint is refused, and is
// made when the cache has it. A rank that was raised before waits again.
func TestTaintsThatHaveChanged(t *testing.T) {
	f := newFleet(t, 8, 8)
	f.reconcile(0)
	f.must("both are there", "4 6", 10)
	f.update("n1", func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: "new", Effect: "NoSchedule"})
	})
	f.have("n1:1")
	result, err := f.ranker.Reconcile(t.Context(), kinds.Request("n1"))
	if err != nil || result.RequeueAfter <= 0 {
		t.Errorf("got %v, %v, want another attempt", result, err)
	}
	f.must("the cache has it", "4 2", 0)
	n, err := f.kube.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	if err != nil || len(n.Spec.Taints) != 4 || n.Spec.Taints[1].Key != "new" {
		t.Errorf("%v, %v", n.Spec.Taints, err)
	}
}

// TestPoolIsWrittenSliceBySlice: a node whose pool isn't whole keeps its rank, and its place in the
// reserve.
func TestPoolIsWrittenSliceBySlice(t *testing.T) {
	f := newFleet(t, 8, 8, 8)
	f.hard = 1
	f.restart()
	f.reconcile(0)
	f.must("nothing is used", "4 4 6h", 10)
	f.pool("n2", 3, 2)
	f.must("the first slice of two is written", "4 4 6h", 10)
	f.pool("n2", 8, 1)
	f.must("the pool is whole", "4 4 6h", 10)
}

// pool replaces a node's pool by a slice of some GPUs, of so many slices.
func (f *fleet) pool(node string, gpus int, slices int64) {
	f.t.Helper()
	all := draclient.New(f.kube).ResourceSlices()
	s, err := all.Get(f.t.Context(), node, metav1.GetOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	s.Spec.Devices = nil
	for g := range gpus {
		s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: device(g)})
	}
	s.Spec.Pool.Generation++
	s.Spec.Pool.ResourceSliceCount = slices
	if _, err := all.Update(f.t.Context(), s, metav1.UpdateOptions{}); err != nil {
		f.t.Fatal(err)
	}
	err = wait.PollUntilContextTimeout(f.t.Context(), time.Millisecond, time.Minute, true, func(context.Context) (bool, error) {
		offered, err := f.slices.Cached(node)
		return len(offered.Ours) == 1 && offered.Ours[0].Spec.Pool.Generation == s.Spec.Pool.Generation, err
	})
	if err != nil {
		f.t.Fatal(err)
	}
}
