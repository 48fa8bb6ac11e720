package control

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
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
	t      *testing.T
	api    client.Client
	store  *sliceStore
	claims fakeClaims
	server *fakeServer
	kinds  *fakeKinds
	nodes  *nodeReconciler
	clock  *testingclock.FakeClock
}

// fakeKinds is a server that serves all kinds but those that are gone.
type fakeKinds struct {
	gone  []string
	asked int
}

func (k *fakeKinds) served(_ context.Context, resource string, _ time.Time) (time.Time, error) {
	k.asked++
	if slices.Contains(k.gone, resource) {
		return time.Time{}, errKindGone
	}
	return time.Time{}, nil
}

// newAPI is an API server in memory.
func newAPI(t *testing.T, objects ...client.Object) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1alpha1.AddToScheme, corev1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithStatusSubresource(&v1alpha1.GPUInventory{}, &v1alpha1.SharingPolicy{}).WithReturnManagedFields().Build()
}

// fakeClaims are allocations by pool.
type fakeClaims map[string][]allocation

func (c fakeClaims) in(pool string) ([]allocation, error) { return c[pool], nil }

func (c fakeClaims) createdAfter(string, time.Time) ([]*resourceapi.ResourceClaim, error) {
	return nil, nil
}

// fakeServer stores counters in some form, or none, and consumable capacity or not.
type fakeServer struct {
	form     publish.Counters
	multiple bool
	charged  bool
	taints   bool
	version  string // empty: v1.36.1
	doubt    string // nothing else is found out
	err      error
	asked    int
	watches  chan struct{}
	// store, if it isn't nil, has the published slices; unfilled is why they can't be read.
	store    *sliceStore
	unfilled error
}

// noVersion is the version of a server that doesn't report any.
const noVersion = "none"

func (s *fakeServer) Probe(context.Context) (publish.Abilities, error) {
	s.asked++
	able := publish.Abilities{
		Counters: cmp.Or(s.form, publish.NoCounters), Multiple: publish.No, Taints: publish.No, InformationalTaints: publish.No,
		Charged: s.charged, Version: cmp.Or(s.version, "v1.36.1"),
	}
	if s.multiple {
		able.Multiple = publish.Yes
	}
	if s.taints {
		able.Taints, able.InformationalTaints = publish.Yes, publish.Yes
	}
	if s.doubt != "" {
		able = publish.Abilities{Charged: able.Charged, Version: able.Version, Doubt: s.doubt}
	}
	if able.Version == noVersion {
		able.Version, able.Charged = "", false
	}
	return able, s.err
}

func (s *fakeServer) Published() ([]*resourceapi.ResourceSlice, error) {
	if s.store == nil || s.unfilled != nil {
		return nil, s.unfilled
	}
	return s.store.slices, nil
}

func (s *fakeServer) Watches() <-chan struct{} { return s.watches }

func newFixture(t *testing.T) *fixture {
	t.Helper()
	s := &fixture{t: t, store: &sliceStore{}, claims: make(fakeClaims), server: &fakeServer{}, kinds: &fakeKinds{}, clock: testingclock.NewFakeClock(time.Unix(1000, 0))}
	s.server.store = s.store
	s.api = newAPI(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	s.restart()
	s.report(func(*v1alpha1.GPUInventory) {})
	return s
}

// restart makes the controller forget.
func (s *fixture) restart() {
	form := newAPIServer(s.server)
	form.clock = s.clock
	leads := make(chan struct{})
	close(leads)
	s.nodes = newNodeReconciler(s.api, s.api, s.store, newPlanner(s.api, s.claims, form, s.kinds), s.kinds, s.clock, leads)
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
