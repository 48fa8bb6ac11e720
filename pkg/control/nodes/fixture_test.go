package nodes

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/control/undone"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// sliceStore holds one node's slices in memory.
type sliceStore struct {
	slices  []*resourceapi.ResourceSlice
	foreign []*resourceapi.ResourceSlice
	// rewrites is a driver that writes foreign slices again when they are deleted.
	rewrites bool
	writes   int
	broken   error // the error of Write, after half of its work
	stuck    error // the error of Delete, which then deletes nothing
	// stale, if it isn't nil, is the content of the cache.
	stale *publish.Found
	lists int
}

func (s *sliceStore) Cached(string) (publish.Found, error) {
	if s.stale != nil {
		return *s.stale, nil
	}
	return publish.Found{Ours: s.slices, Foreign: s.foreign}, nil
}

func (s *sliceStore) Offers(_ string, device gpu.DeviceName) bool {
	return slices.ContainsFunc(s.slices, func(s *resourceapi.ResourceSlice) bool {
		return slices.ContainsFunc(s.Spec.Devices, func(d resourceapi.Device) bool { return d.Name == string(device) })
	})
}

func (s *sliceStore) Live(context.Context, string) (publish.Found, error) {
	s.lists++
	return publish.Found{Ours: slices.Clone(s.slices), Foreign: slices.Clone(s.foreign)}, nil
}

func (s *sliceStore) Write(_ context.Context, _ []*resourceapi.ResourceSlice, want []resourceapi.ResourceSlice) error {
	s.writes++
	if s.broken != nil {
		want = want[:len(want)/2]
	}
	s.slices = nil
	for i := range want {
		want[i].Spec.Pool.Generation = int64(s.writes)
		s.slices = append(s.slices, &want[i])
	}
	return s.broken
}

func (s *sliceStore) Delete(_ context.Context, current []*resourceapi.ResourceSlice) error {
	s.writes++
	if s.stuck != nil && len(current) > 0 {
		return s.stuck
	}
	deleted := func(have *resourceapi.ResourceSlice) bool {
		return slices.ContainsFunc(current, func(d *resourceapi.ResourceSlice) bool { return d.Name == have.Name })
	}
	s.slices = slices.DeleteFunc(s.slices, deleted)
	if !s.rewrites {
		s.foreign = slices.DeleteFunc(s.foreign, deleted)
	}
	return nil
}

// fixture is a controller, one node of two GPUs, and its plugin.
type fixture struct {
	t       *testing.T
	api     client.WithWatch
	store   *sliceStore
	claims  controltest.Claims
	server  *controltest.Server
	nodes   *Reconciler
	clock   *testingclock.FakeClock
	metrics *prometheus.Registry
	// unfilled is why the published slices can't be read.
	unfilled error
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	s := &fixture{t: t, store: &sliceStore{}, claims: controltest.NewClaims(t), server: &controltest.Server{}, clock: testingclock.NewFakeClock(time.Unix(1000, 0))}
	s.server.Slices = func() ([]*resourceapi.ResourceSlice, error) { return s.store.slices, s.unfilled }
	s.api = controltest.NewAPI(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	s.restart()
	s.report(func(*v1alpha1.GPUInventory) {})
	return s
}

// restart makes the controller forget.
func (s *fixture) restart() {
	s.metrics = prometheus.NewRegistry()
	asked := server.New(s.server, s.clock)
	planner := plan.New(s.api, s.claims.Index, asked, kinds.Definitions{Server: s.api, Clock: s.clock}, s.metrics)
	leads := make(chan struct{})
	close(leads)
	s.nodes = New(Config{
		Client: s.api, Reader: s.api, Slices: s.store, Planner: planner, Server: asked, Claims: s.claims.Index,
		Writes: undone.New(s.clock), Events: &events.FakeRecorder{}, Metrics: s.metrics, Clock: s.clock, Leads: leads,
	})
}

// decide returns the decision on a node.
func (s *fixture) decide(inv *v1alpha1.GPUInventory) (plan.Decision, error) {
	in, err := s.nodes.Planner.Input(s.t.Context(), inv)
	if err != nil {
		return plan.Decision{}, err
	}
	return s.nodes.Planner.Decide(s.t.Context(), inv, in)
}

// report replaces the node's inventory with a changed one.
func (s *fixture) report(change func(*v1alpha1.GPUInventory)) {
	s.t.Helper()
	old := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
	_ = s.api.Delete(s.t.Context(), old)
	inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{
		Name: "n", UID: "first", OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n", UID: "1"}},
	}}
	inv.Status = v1alpha1.GPUInventoryStatus{RegisteredAt: new(metav1.NowMicro()), GPUs: []v1alpha1.GPU{
		{UUID: "GPU-11111111-0000-0000-0000-000000000000", Index: 0}, {UUID: "GPU-22222222-0000-0000-0000-000000000000", Index: 1},
	}}
	change(inv)
	status := inv.Status
	if err := s.api.Create(s.t.Context(), inv); err != nil {
		s.t.Fatal(err)
	}
	inv.Status = status
	if err := s.api.Status().Update(s.t.Context(), inv); err != nil {
		s.t.Fatal(err)
	}
}

func (s *fixture) inventory() *v1alpha1.GPUInventory {
	s.t.Helper()
	inv := &v1alpha1.GPUInventory{}
	if err := s.api.Get(s.t.Context(), client.ObjectKey{Name: "n"}, inv); err != nil {
		s.t.Fatal(err)
	}
	return inv
}

// pluginAnswers answers a request as a running plugin does.
func (s *fixture) pluginAnswers() {
	s.t.Helper()
	inv := s.inventory()
	inv.Status.PublishResponse = inv.Spec.PublishRequest
	if err := s.api.Status().Update(s.t.Context(), inv); err != nil {
		s.t.Fatal(err)
	}
}

func (s *fixture) reconcile() error {
	r := reconcile.Request{}
	r.Name = "n"
	_, err := s.nodes.Reconcile(s.t.Context(), r)
	return err
}

func (s *fixture) mustReconcile() {
	s.t.Helper()
	if err := s.reconcile(); err != nil {
		s.t.Fatal(err)
	}
}

// publish reconciles until the pool is written: the plugin is asked first, and answers.
func (s *fixture) publish() {
	s.t.Helper()
	s.mustReconcile()
	s.pluginAnswers()
	s.mustReconcile()
}

// published brings the scene to its normal state.
func (s *fixture) published() {
	s.t.Helper()
	s.publish()
	s.mustHave(1)
}

func (s *fixture) mustHave(n int) {
	s.t.Helper()
	if len(s.store.slices) != n {
		s.t.Fatalf("%d slices are published, want %d", len(s.store.slices), n)
	}
}

func (s *fixture) mustHaveAsked(times int64) {
	s.t.Helper()
	if got := s.inventory().Spec.PublishRequest; got != times {
		s.t.Fatalf("the plugin was asked %d times, want %d", got, times)
	}
}

// publishAfterAnswer lets the plugin answer, and expects the pool then.
func (s *fixture) publishAfterAnswer() {
	s.t.Helper()
	s.pluginAnswers()
	s.mustReconcile()
	s.mustHave(1)
}

// mustBeFull reconciles a node whose slices can't be written.
func (s *fixture) mustBeFull() {
	s.t.Helper()
	s.store.broken = errors.New("the server is full")
	if err := s.reconcile(); !errors.Is(err, s.store.broken) {
		s.t.Fatalf("got %v, want %v", err, s.store.broken)
	}
	s.store.broken = nil
}
