package prepare_test

import (
	"errors"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

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
			if tc.want == "" {
				if len(f.doubles) > 0 {
					t.Errorf("reported %v", f.doubles)
				}
				return
			}
			if len(f.doubles) != 1 {
				t.Fatalf("reported %v, want it once", f.doubles)
			}
			d := f.doubles[0]
			if d.Refused.Claim.Name != "new" || string(d.Refused.Device) != tc.second.Device || d.Holder.Claim.Name != "old" || string(d.Holder.Device) != tc.first.Device {
				t.Errorf("reported %+v", d)
			}
			checkHeld(t, f, "old")
		})
	}
}

// doublyAllocate prepares the first of two claims that have their devices.
func (f *fixture) doublyAllocate(t *testing.T, first resourceapi.DeviceRequestAllocationResult) {
	t.Helper()
	mustPrepare(t, f, newClaim("old", first))
	f.holders.set("old", prepare.Standing{Reason: "pod default/old uses it"})
	f.holders.set("new", prepare.Standing{Reason: "pod default/new uses it"})
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
	for want := range 3 {
		f.doubleError = nil
		if want < 2 {
			f.doubleError = errors.New("the API server is away")
		}
		f.refuse(t, second)
		if len(f.doubles) != want+1 {
			t.Fatalf("reported %d times in %d", len(f.doubles), want+1)
		}
	}
	f.refuse(t, second)
	if len(f.doubles) != 3 {
		t.Error("reported again after it was written down")
	}
	for _, boot := range []string{"boot-1", "boot-2"} {
		f.journal.Close()
		f = start(t, f.node, boot, nil)
		if err := f.Recover(testContext(t)); err != nil {
			t.Fatal(err)
		}
		f.doublyAllocate(t, first)
		f.refuse(t, second)
		if len(f.doubles) > 0 {
			t.Errorf("reported again in %s", boot)
		}
	}
	_, err := f.Prepare(testContext(t), newClaim("another", second))
	if err == nil || len(f.doubles) > 0 {
		t.Errorf("reported %v of a claim of which nothing is known", f.doubles)
	}
	f.holders.set("another", prepare.Standing{Reason: "pod default/another uses it"})
	if _, err := f.Prepare(testContext(t), newClaim("another", second)); err == nil || len(f.doubles) != 1 {
		t.Errorf("reported %v, want that of another claim", f.doubles)
	}
}

// TestClaimThatIsNotDoublyAllocated: a claim that isn't allocated any more, or of which
// nothing is known, doesn't blame the scheduler.
func TestClaimThatIsNotDoublyAllocated(t *testing.T) {
	for name, standing := range map[string]*prepare.Standing{
		"deallocated meanwhile": {AwaitsUnprepare: true, Reason: "the claim was deallocated"},
		"unknown":               nil,
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			mustPrepare(t, f, newClaim("old", asked("s", gpu0, "1", "10Gi", "50")))
			f.holders.set("old", prepare.Standing{Reason: "pod default/old uses it"})
			if standing != nil {
				f.holders.set("new", *standing)
			}
			f.refuse(t, result("g", 0))
			if len(f.doubles) > 0 {
				t.Errorf("reported %v", f.doubles)
			}
		})
	}
}
