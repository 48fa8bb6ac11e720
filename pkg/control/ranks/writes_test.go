package ranks

import (
	"net/http"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/tessera-dra/tessera/pkg/control/controltest"
)

// TestManyWrites: a large cluster's first ranks are written at a bounded rate.
func TestManyWrites(t *testing.T) {
	f := newFleet(t, 2, 2, 2, 2)
	const atOnce = 3
	f.ranker.rate = flowcontrol.NewTokenBucketPassiveRateLimiter(1e-6, atOnce)
	f.reconcile(0)
	f.reconcile(10)
	if n := f.writes(); n != atOnce {
		t.Errorf("%d writes at once, want %d", n, atOnce)
	}
	if f.ranker.next.IsZero() {
		t.Error("nothing is written later")
	}
}

// refuse has the server refuse writes of a Node, or of all Nodes: "".
func (f *fleet) refuse(node string, err error) {
	f.kube.PrependReactor("patch", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return err != nil && (node == "" || a.(clienttesting.PatchAction).GetName() == node), nil, err
	})
}

// errPolicy is what the server says if an admission policy that gives no reason denies a write.
var errPolicy = apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "patch", corev1.Resource("nodes"), "", "ValidatingAdmissionPolicy 'theirs' denied request", 0, false)

// TestFailures: a write that fails is made at the next attempt, and failures are tried and logged
// a few times a minute.
func TestFailures(t *testing.T) {
	for name, failure := range map[string]error{"full disk": controltest.ErrFull, "admission policy": errPolicy} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, 8, 8)
			f.reconcile(0)
			f.refuse("", failure)
			f.clock.Step(pause)
			controltest.Queue{Reconciler: f.ranker, Clock: f.clock}.MustBeSlow(t, "n0")
			f.must("writes fail", "0 0", 0)
			f.kube.ReactionChain = f.kube.ReactionChain[1:]
			f.must("writes succeed again", "4 6", 30)
		})
	}
}

// TestRefusedNodeKeepsNoOther: nodes whose writes are refused don't use up the rate.
func TestRefusedNodeKeepsNoOther(t *testing.T) {
	f := newFleet(t, 8, 8, 8)
	f.reconcile(0)
	f.refuse("n0", errPolicy)
	f.clock.Step(pause)
	for range 10 {
		f.ranker.rate = flowcontrol.NewTokenBucketPassiveRateLimiter(1e-6, 1) // one write at a time
		f.reconcile(1)
	}
	f.must("n0 is refused", "0 4 6", 0)
}
