package classes

import (
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	draclient "k8s.io/dynamic-resource-allocation/client"
	testingclock "k8s.io/utils/clock/testing"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// oldServer stores no extended resource names, until it is upgraded.
type oldServer struct {
	upgraded bool
	writes   []string
}

// react stores what is written without the name.
func (s *oldServer) react(a clienttesting.Action) (bool, runtime.Object, error) {
	var o runtime.Object
	switch a := a.(type) {
	case clienttesting.CreateAction: // an update is one too
		o = a.GetObject()
	default:
		return false, nil, nil
	}
	class := o.(*resourceapi.DeviceClass).DeepCopy()
	s.writes = append(s.writes, a.GetVerb()+" "+class.Name)
	if !s.upgraded {
		class.Spec.ExtendedResourceName = nil
	}
	return true, class, nil
}

// newReconciler returns the reconciler of one class, its server, file, events and clock.
func newReconciler(t *testing.T) (*Reconciler, *oldServer, *Wanted, *events.FakeRecorder, *testingclock.FakePassiveClock) {
	t.Helper()
	wanted, err := read(t, file)
	if err != nil {
		t.Fatal(err)
	}
	server := &oldServer{}
	api := fake.NewClientset()
	api.PrependReactor("*", "deviceclasses", server.react)
	scheme := runtime.NewScheme()
	if err := rbacv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "tessera-controller", UID: "1"}}
	recorder := events.NewFakeRecorder(10)
	r := New(wanted, draclient.New(api), fakeclient.NewClientBuilder().WithScheme(scheme).WithObjects(role).Build(), recorder)
	clock := testingclock.NewFakePassiveClock(time.Unix(1000, 0))
	r.clock, r.writes = clock, undone.New(clock)
	return r, server, wanted, recorder, clock
}

// TestServerWithoutExtendedResources checks that a class without the name is as good
// as it gets, that this is told once, and that the server is asked again.
func TestServerWithoutExtendedResources(t *testing.T) {
	r, server, wanted, recorder, clock := newReconciler(t)

	// reconcile returns what was written, and how many events.
	reconciled := func(request reconcile.Request) (writes string, told int, again time.Duration) {
		t.Helper()
		server.writes = nil
		result, err := r.Reconcile(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		for range len(recorder.Events) {
			if event := <-recorder.Events; strings.Contains(event, "ExtendedResourceNotStored") {
				told++
			}
		}
		return strings.Join(server.writes, ", "), told, result.RequeueAfter
	}
	writes, told, again := reconciled(reconcile.Request{})
	if writes != "create gpu.nvidia.com" || told != 1 || again != askAgainAfter {
		t.Errorf("a new class: wrote %q, %d events, again in %v", writes, told, again)
	}
	have := stored(wanted, func(o *resourceapi.DeviceClass) {
		o.Spec.ExtendedResourceName = nil
	})
	if err := r.Informer.GetStore().Add(have); err != nil {
		t.Fatal(err)
	}
	if writes, told, _ := reconciled(reconcile.Request{}); writes != "" || told != 0 {
		t.Errorf("what the server has: wrote %q, %d events", writes, told)
	}
	clock.SetTime(clock.Now().Add(askAgainAfter))
	if writes, told, _ := reconciled(reconcile.Request{}); writes != "update gpu.nvidia.com" || told != 0 {
		t.Errorf("later: wrote %q, %d events, want the name sent again and no further event", writes, told)
	}
	server.upgraded = true
	writes, told, again = reconciled(RequestServerChanged())
	if writes != "update gpu.nvidia.com" || told != 0 || again != 0 {
		t.Errorf("after an upgrade: wrote %q, %d events, again in %v", writes, told, again)
	}
}

// TestFightOverAClass: somebody changes a class back each time.
func TestFightOverAClass(t *testing.T) {
	r, server, wanted, recorder, clock := newReconciler(t)
	server.upgraded = true
	for range 300 {
		// The server forgets the update: somebody else has undone it.
		if err := r.Informer.GetStore().Add(stored(wanted, func(o *resourceapi.DeviceClass) { o.Spec.Selectors = nil })); err != nil {
			t.Fatal(err)
		}
		result, err := r.Reconcile(t.Context(), reconcile.Request{})
		if err != nil || len(server.writes) > 0 && result.RequeueAfter > undone.Quiet {
			t.Fatalf("again in %s, error %v", result.RequeueAfter, err)
		}
		clock.SetTime(clock.Now().Add(time.Second))
	}
	if n := len(server.writes); n > 16 || n < 8 {
		t.Errorf("%d writes in five minutes", n)
	}
	if n := len(recorder.Events); n != 1 {
		t.Fatalf("%d events, want one", n)
	}
	if e := <-recorder.Events; !strings.Contains(e, "Warning Overwritten Somebody else changes") {
		t.Errorf("event %q", e)
	}
}
