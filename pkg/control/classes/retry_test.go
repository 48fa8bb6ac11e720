package classes

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fakediscovery "k8s.io/client-go/discovery/fake"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	testingclock "k8s.io/utils/clock/testing"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/pkg/control/controltest"
)

// TestFailuresAreRetriedSeldom: classes that can't be written are tried and logged a few times a
// minute.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	controltest.Queue{Reconciler: classesOfRefusingServer(t), Clock: testingclock.NewFakeClock(time.Unix(1000, 0))}.MustBeSlow(t, "")
}

// classesOfRefusingServer returns the reconciler of two classes at a server that refuses all
// writes.
func classesOfRefusingServer(t *testing.T) *Reconciler {
	t.Helper()
	file := filepath.Join(t.TempDir(), "device-classes.yaml")
	if err := os.WriteFile(file, []byte("owner: owner\nclasses: [{name: a, spec: {}}, {name: b, spec: {}}]"), 0o600); err != nil {
		t.Fatal(err)
	}
	wanted, err := Read(file)
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
	r := New(wanted, discovery, api, reader, events.NewFakeRecorder(10))
	if _, err := r.Reconcile(t.Context(), reconcile.Request{}); !errors.Is(err, controltest.ErrFull) {
		t.Fatalf("got %v, want %v", err, controltest.ErrFull)
	}
	return r
}
