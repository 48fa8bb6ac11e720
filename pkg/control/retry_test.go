package control

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fakediscovery "k8s.io/client-go/discovery/fake"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/classes"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/labels"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// queued runs a reconciler as controller-runtime's queue does, with an event after each
// attempt that has written something: each write wakes the controller.
type queued struct {
	reconciler reconcile.Reconciler
	clock      *testingclock.FakeClock
	// state differs after a write.
	state   func() string
	limiter workqueue.TypedRateLimiter[reconcile.Request]
}

// minute runs it for a minute, and returns how often it was called, and how many lines were
// logged, of which the queue logs one for each error.
func (q *queued) minute(t *testing.T, name string) (attempts, lines int) {
	t.Helper()
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	ctx := klog.NewContext(t.Context(), logger)
	r := reconcile.Request{NamespacedName: client.ObjectKey{Name: name}}
	for end := q.clock.Now().Add(time.Minute); q.clock.Now().Before(end) && attempts < 1000; {
		before := q.state()
		result, err := q.reconciler.Reconcile(ctx, r)
		attempts++
		next := time.Minute
		switch {
		case err != nil:
			lines++
			next = q.limiter.When(r)
		case result.RequeueAfter > 0:
			q.limiter.Forget(r)
			next = result.RequeueAfter
		default:
			q.limiter.Forget(r)
		}
		if q.state() != before {
			next = min(next, time.Millisecond)
		}
		q.clock.Step(next)
	}
	return attempts, lines + len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data())
}

// TestFailuresAreRetriedSeldom: a reconciler that fails each time is called and logged a few
// times a minute, although what it wrote before the failure wakes it.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T) (q *queued, name string){
		"slices can't be written": func(t *testing.T) (*queued, string) {
			s := newFixture(t)
			s.server.Form = publish.SplitCounters
			s.cuttable()
			s.mustReconcile()
			s.pluginAnswers()
			s.store.broken = controltest.ErrFull
			return s.queued(s.nodes), "n"
		},
		"slices can't be deleted": func(t *testing.T) (*queued, string) {
			s := newFixture(t)
			s.published()
			s.store.stuck = controltest.ErrFull
			s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.RegisteredAt = nil })
			return s.queued(s.nodes), "n"
		},
		"another driver's slices come back": func(t *testing.T) (*queued, string) {
			s := newFixture(t)
			s.store.rewrites = true
			s.store.foreign = append(s.store.foreign, foreignSlice())
			return s.queued(reconcile.Func(func(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
				if inv := s.inventory(); inv.Status.PublishResponse != inv.Spec.PublishRequest {
					s.pluginAnswers()
				}
				return s.nodes.Reconcile(ctx, r)
			})), "n"
		},
		"the plugin can't be asked": func(t *testing.T) (*queued, string) {
			s := newFixture(t)
			s.nodes.client = controltest.FailingWrites(s.api)
			return s.queued(s.nodes), "n"
		},
		"a policy's status can't be written": func(t *testing.T) (*queued, string) {
			f := newFleet(t, publish.SplitCounters, controltest.Policy("a", v1alpha1.SharingPolicySpec{}))
			f.policies.client = controltest.FailingWrites(f.api)
			q := f.queued(nil)
			f.policies.clock, q.reconciler = q.clock, f.policies
			return q, ""
		},
		"labels can't be written": func(t *testing.T) (*queued, string) {
			f := newFleet(t, publish.SplitCounters, controltest.NodeWith("n", "a", controltest.H100(0))...)
			q := f.queued(nil)
			q.reconciler = labels.NewLabeler(controltest.FailingWrites(f.api), f.api, q.clock, undone.New(q.clock))
			return q, "n"
		},
		"classes can't be written": func(t *testing.T) (*queued, string) {
			return newQueued(classesOfRefusingServer(t), testingclock.NewFakeClock(time.Unix(1000, 0)), func() string { return "" }), ""
		},
	} {
		t.Run(name, func(t *testing.T) {
			q, name := prepare(t)
			for _, most := range []int{25, 10, 10} {
				attempts, lines := q.minute(t, name)
				if attempts == 0 || attempts > most || lines > most {
					t.Errorf("%d attempts and %d log lines in a minute, want at most %d", attempts, lines, most)
				}
			}
		})
	}
}

func (s *fixture) queued(r reconcile.Reconciler) *queued {
	return newQueued(r, s.clock, func() string {
		state := s.inventory().ResourceVersion
		for _, slice := range slices.Concat(s.store.slices, s.store.foreign) {
			state += fmt.Sprint(" ", slice.Name, slice.Spec.Pool.Generation)
		}
		return state
	})
}

func (f *fleet) queued(r reconcile.Reconciler) *queued {
	return newQueued(r, testingclock.NewFakeClock(time.Unix(1000, 0)), func() string { return "" })
}

func newQueued(r reconcile.Reconciler, c *testingclock.FakeClock, state func() string) *queued {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](firstRetryDelay, maxRetryDelay)
	return &queued{reconciler: r, clock: c, state: state, limiter: limiter}
}

// classesOfRefusingServer returns the reconciler of two classes at a server that refuses all
// writes.
func classesOfRefusingServer(t *testing.T) *classes.Reconciler {
	t.Helper()
	file := filepath.Join(t.TempDir(), "device-classes.yaml")
	if err := os.WriteFile(file, []byte("owner: owner\nclasses: [{name: a, spec: {}}, {name: b, spec: {}}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	wanted, err := classes.Read(file)
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := rbacv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	api := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme())
	api.PrependReactor("create", "deviceclasses", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, controltest.ErrFull })
	discovery := &fakediscovery.FakeDiscovery{Fake: &clienttesting.Fake{Resources: []*metav1.APIResourceList{
		{GroupVersion: "resource.k8s.io/v1", APIResources: []metav1.APIResource{{Name: "resourceslices"}, {Name: "deviceclasses"}}},
	}}}
	owner := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "owner", UID: "1"}}
	reader := fakeclient.NewClientBuilder().WithScheme(scheme).WithObjects(owner).Build()
	r := classes.New(wanted, discovery, api, reader, events.NewFakeRecorder(10))
	if _, err := r.Reconcile(t.Context(), reconcile.Request{}); !errors.Is(err, controltest.ErrFull) {
		t.Fatalf("got %v, want %v", err, controltest.ErrFull)
	}
	return r
}
