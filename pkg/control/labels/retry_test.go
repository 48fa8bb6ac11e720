package labels

import (
	"testing"
	"time"

	testingclock "k8s.io/utils/clock/testing"

	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// TestFailuresAreRetriedSeldom: labels that can't be written are tried and logged a few times a
// minute.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	api, now := controltest.NewAPI(t, controltest.NodeWith("n", "a", controltest.H100(0))...), testingclock.NewFakeClock(time.Unix(1000, 0))
	l := NewLabeler(controltest.FailingWrites(api), api, now, undone.New(now))
	controltest.Queue{Reconciler: l, Clock: now}.MustBeSlow(t, "n")
}
