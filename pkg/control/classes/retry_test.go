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
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	draclient "k8s.io/dynamic-resource-allocation/client"
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
	api := fake.NewClientset()
	api.PrependReactor("create", "deviceclasses", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, controltest.ErrFull })
	owner := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "owner", UID: "1"}}
	reader := fakeclient.NewClientBuilder().WithScheme(scheme).WithObjects(owner).Build()
	r := New(wanted, draclient.New(api), reader, events.NewFakeRecorder(10))
	if _, err := r.Reconcile(t.Context(), reconcile.Request{}); !errors.Is(err, controltest.ErrFull) {
		t.Fatalf("got %v, want %v", err, controltest.ErrFull)
	}
	return r
}
