package policies

import (
	"slices"
	"strings"
	"testing"
	"time"

	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// mostWrites is how often the controller writes in the five minutes of a fight, at most.
const mostWrites = 16

// TestFightOverStatuses: somebody restores the status of a policy each time.
func TestFightOverStatuses(t *testing.T) {
	f := newFleet(t, publish.NoCounters, slices.Concat(controltest.NodeWith("n", "", controltest.L4(0)), []client.Object{controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()})})...)
	now := testingclock.NewFakeClock(time.Unix(1000, 0))
	f.policies.Clock, f.policies.Writes = now, undone.New(now)
	writes := 0
	for range 300 {
		if _, err := f.policies.Reconcile(t.Context(), reconcile.Request{}); err != nil {
			t.Fatal(err)
		}
		p := &v1alpha1.SharingPolicy{}
		if err := f.api.Get(t.Context(), client.ObjectKey{Name: "p"}, p); err != nil {
			t.Fatal(err)
		}
		if len(p.Status.Conditions) > 0 {
			writes++
			p.Status = v1alpha1.SharingPolicyStatus{}
			if err := f.api.Status().Update(t.Context(), p); err != nil {
				t.Fatal(err)
			}
		}
		now.Step(time.Second)
	}
	if writes > mostWrites || writes < mostWrites/2 {
		t.Errorf("%d writes", writes)
	}
	if got := f.warnings(); len(got) != 1 || !strings.HasPrefix(got[0], "Warning Overwritten The status of this SharingPolicy is changed again and again") {
		t.Errorf("events %q", got)
	}
}
