package policies

import (
	"testing"
	"time"

	testingclock "k8s.io/utils/clock/testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// TestFailuresAreRetriedSeldom: a status that can't be written is tried and logged a few times a
// minute.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, controltest.Policy("a", v1alpha1.SharingPolicySpec{}))
	now := testingclock.NewFakeClock(time.Unix(1000, 0))
	f.policies.Client, f.policies.Clock = controltest.FailingWrites(f.api), now
	controltest.Queue{Reconciler: f.policies, Clock: now}.MustBeSlow(t, "")
}
