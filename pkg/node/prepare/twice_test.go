package prepare_test

import (
	"errors"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// TestAllocatedTwice: a device that an older scheduler allocates twice is
// refused, and the kubelet's event for the pod names the version with the fix.
// Other conflicts have other causes.
func TestAllocatedTwice(t *testing.T) {
	for name, tc := range map[string]struct {
		first, second resourceapi.DeviceRequestAllocationResult
		scheduler     bool
	}{
		"whole beside a share":        {asked("s", gpu0, "1", "10Gi", "50"), result("g", 0), true},
		"a share beside the whole":    {result("g", 0), asked("s", gpu0, "1", "10Gi", "50"), true},
		"whole beside the whole":      {result("g", 0), result("g", 0), false},
		"whole beside an equal share": {share("s", 0, 2, 0), result("g", 0), false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			mustPrepare(t, f, newClaim("old", tc.first))
			f.holders.set("old", prepare.Standing{Reason: "pod default/old uses it"})
			_, err := f.Prepare(testContext(t), newClaim("new", tc.second))
			if !errors.Is(err, prepare.ErrHeld) {
				t.Fatalf("got %v, want ErrHeld", err)
			}
			told := strings.Contains(err.Error(), "kubernetes/kubernetes#139034") && strings.Contains(err.Error(), "before 1.36.2")
			if told != tc.scheduler {
				t.Errorf("got %q; named the scheduler: %v, want %v", err, told, tc.scheduler)
			}
			checkHeld(t, f, "old")
		})
	}
}
