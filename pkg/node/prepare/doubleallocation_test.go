package prepare_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

// TestDoubleAllocation: a claim that needs what another one holds is refused. If only
// counters keep the two devices apart, that is reported, and the kubelet's event for
// the pod blames the scheduler. Other conflicts have other causes.
func TestDoubleAllocation(t *testing.T) {
	size := asked("s", gpu0, "1", "10Gi", "50")
	for name, tc := range map[string]struct {
		first, second resourceapi.DeviceRequestAllocationResult
		want          string // in the error; empty: nothing is reported
	}{
		"whole beside a share by size": {size, result("g", 0), "before 1.36.2 allocate shares and what overlaps them twice (kubernetes/kubernetes#139034)"},
		"a share by size beside whole": {result("g", 0), size, "before 1.36.2"},
		"whole beside an equal share":  {share("s", 0, 2, 0), result("g", 0), "older than the API server"},
		"whole beside a partition":     {part("p", 0, "1g.10gb", 0), result("g", 0), "older than the API server"},
		"overlapping partitions":       {part("p", 0, "1g.10gb", 0), part("p", 0, "3g.40gb", 0), "older than the API server"},
		"whole beside the whole":       {result("g", 0), result("g", 0), ""},
		"a partition beside itself":    {part("p", 0, "1g.10gb", 0), part("p", 0, "1g.10gb", 0), ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			f.doublyAllocate(t, tc.first)
			err := f.refuse(t, tc.second)
			if told := strings.Contains(err.Error(), "schedulers"); told != (tc.want != "") || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %q, want in it %q", err, tc.want)
			}
			got := f.reported(t)
			if tc.want == "" {
				if len(got) > 0 {
					t.Errorf("reported %q", got)
				}
				return
			}
			want := fmt.Sprintf("allocated %s to claim default/old, and %s to claim default/new, which the node refuses", tc.first.Device, tc.second.Device)
			if len(got) != 1 || !strings.Contains(got[0], want) || !strings.Contains(got[0], "While the API server is Kubernetes v1.36.3,") {
				t.Errorf("reported %q, want %q", got, want)
			}
			if c := f.server.condition(); c == nil || !strings.HasSuffix(got[0], c.Message) {
				t.Errorf("condition of the GPUInventory %+v, want the message of the event", c)
			}
			checkHeld(t, f, "old")
		})
	}
}

// reported returns the double allocations that were reported since it was called last.
func (f *fixture) reported(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(f.told(t, corev1.EventTypeWarning), func(e string) bool {
		return !strings.Contains(e, v1alpha1.ConditionDoubleAllocation)
	})
}

// doublyAllocate prepares the first of two claims that have their devices.
func (f *fixture) doublyAllocate(t *testing.T, first resourceapi.DeviceRequestAllocationResult) {
	t.Helper()
	runUntilEnd(t, f.reporter.Run)
	mustPrepare(t, f, newClaim("old", first))
	f.server.set("old", inUse)
	f.server.set("new", inUse)
}

// refuse has the kubelet try to prepare the second, and returns the error.
func (f *fixture) refuse(t *testing.T, second resourceapi.DeviceRequestAllocationResult) error {
	t.Helper()
	_, err := f.Prepare(testContext(t), newClaim("new", second))
	if !errors.Is(err, prepare.ErrHeld) {
		t.Fatalf("got %v, want ErrHeld", err)
	}
	return err
}

// TestDoubleAllocationIsReportedOnce: again and again until it is written down, and
// then never again of the same two claims, also by the next plugin and after a reboot.
func TestDoubleAllocationIsReportedOnce(t *testing.T) {
	f := newFixture(t, 1)
	first, second := part("p", 0, "1g.10gb", 0), result("g", 0)
	f.doublyAllocate(t, first)
	for n := range 4 {
		f.server.setVersion("")
		if n >= 2 {
			f.server.setVersion("v1.36.3")
		}
		f.refuse(t, second)
		if got := f.reported(t); (len(got) == 1) != (n == 2) {
			t.Errorf("reported %q at refusal %d, want it once, when the API server said its version", got, n)
		}
	}
	for _, boot := range []string{"boot-1", "boot-2"} {
		f.journal.Close()
		f = start(t, f.node, boot, nil)
		if err := f.Recover(testContext(t)); err != nil {
			t.Fatal(err)
		}
		f.doublyAllocate(t, first)
		f.refuse(t, second)
		if got := f.reported(t); len(got) > 0 {
			t.Errorf("reported %q again in %s", got, boot)
		}
	}
	_, err := f.Prepare(testContext(t), newClaim("another", second))
	if got := f.reported(t); err == nil || len(got) > 0 {
		t.Errorf("reported %q of a claim of which nothing is known", got)
	}
	f.server.set("another", inUse)
	_, err = f.Prepare(testContext(t), newClaim("another", second))
	if got := f.reported(t); err == nil || len(got) != 1 {
		t.Errorf("reported %q, want that of another claim", got)
	}
}

// TestClaimThatIsNotDoublyAllocated: a claim that isn't allocated any more, or of which
// nothing is known, doesn't blame the scheduler.
func TestClaimThatIsNotDoublyAllocated(t *testing.T) {
	for name, is := range map[string]state{"deallocated meanwhile": deallocated, "unknown": unknown} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			mustPrepare(t, f, newClaim("old", asked("s", gpu0, "1", "10Gi", "50")))
			f.server.set("old", inUse)
			f.server.set("new", is)
			f.refuse(t, result("g", 0))
			if got := f.reported(t); len(got) > 0 {
				t.Errorf("reported %q", got)
			}
		})
	}
}
