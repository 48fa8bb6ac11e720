package ranks

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

func TestRemoveAll(t *testing.T) {
	f := newFleet(t, 8, 8, 4)
	f.hard = 1
	f.restart()
	f.reconcile(0)
	f.must("nothing is used", "4 6h 0", 10)
	f.writes()
	for range 2 {
		if err := RemoveAll(t.Context(), f.kube.CoreV1().Nodes()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff("0 0 0", f.seen()); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	if n := f.writes(); n != 2 {
		t.Errorf("%d writes, want 2", n)
	}
}

// TestRemoveAllPassesFailures: a Node that is refused keeps its taints, and no other does.
func TestRemoveAllPassesFailures(t *testing.T) {
	for _, failure := range []error{errPolicy, apierrors.NewForbidden(corev1.Resource("nodes"), "n0", nil)} {
		f := newFleet(t, 8, 8, 8)
		f.reconcile(0)
		f.must("nothing is used", "4 4 6", 10)
		f.refuse("n0", failure)
		if err := RemoveAll(t.Context(), f.kube.CoreV1().Nodes()); !errors.Is(err, failure) {
			t.Errorf("got %v, want %v", err, failure)
		}
		if diff := cmp.Diff("4 0 0", f.seen()); diff != "" {
			t.Errorf("%v (-want +got):\n%s", failure, diff)
		}
	}
}
