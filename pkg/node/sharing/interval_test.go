package sharing_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

func TestTimeSliceUnsupported(t *testing.T) {
	m := newMachine()
	changes := 0
	n := startWith(t, m, t.TempDir(), "boot-1", sharing.Config{ConditionsChanged: func() { changes++ }})
	n.SetTimeSlices(map[gpu.UUID]string{gpu0: "Long"})
	m.set(func() {
		m.fault = func(call string) error {
			if strings.HasPrefix(call, "--set") {
				return errors.New("exit status 2")
			}
			return nil
		}
	})
	for range 2 {
		_, err := n.Join(t.Context(), n.hold(t, claim("a", replica(gpu0, 0))), nil)
		wantError(t, err, "can't be set on this GPU", "Not Supported")
		n.unprepare(t, "a")
		if got := n.Conditions()[gpu0]; len(got) != 1 || got[0].Type != gpu.TimeSliceUnsupported || got[0].Blocks() {
			t.Errorf("conditions: %v", got)
		}
	}
	n.SetTimeSlices(map[gpu.UUID]string{gpu0: "Default"})
	if got := n.Conditions(); len(got) > 0 {
		t.Errorf("after the policy asks for the default: %v", got)
	}
	n.prepare(t, claim("a", replica(gpu0, 0)))
	if changes != 2 {
		t.Errorf("told of %d changes, want 2", changes)
	}
	n.unprepare(t, "a")
	n.check(t, is{})
}

// TestPolicyChanges while claims have replicas.
func TestPolicyChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		n.prepare(t, claim("a", replica(gpu0, 0)))
		for _, want := range []string{"Long", "Short", "Default", "Medium"} {
			n.SetTimeSlices(map[gpu.UUID]string{gpu0: want})
			synctest.Wait()
			m.mu.Lock()
			if got := m.intervals[gpu0]; got != want {
				t.Errorf("interval: got %s, want %s", got, want)
			}
			m.mu.Unlock()
		}
		runs := m.count("--")
		n.prepare(t, claim("b", replica(gpu0, 1)))
		if got := m.count("--"); got != runs {
			t.Errorf("nvidia-smi ran %d times for nothing", got-runs)
		}
		end()
		n = n.restart(t, "boot-1") // what policies want isn't known yet
		n.check(t, is{Intervals: map[gpu.UUID]string{gpu0: "Medium"}, Settings: []holding.Settings{changedSlice(gpu0, "Default")}})
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestIntervalIsVerified: an interval that a reset of the GPU lost is set again,
// one that another program has set stays.
func TestIntervalIsVerified(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		n.prepare(t, claim("a", wholeSlice(gpu0, "Long")))
		for set, want := range map[string]string{"Default": "Long", "Short": "Short"} {
			m.do(func() { m.intervals[gpu0] = set })
			time.Sleep(2 * time.Minute)
			m.mu.Lock()
			if got := m.intervals[gpu0]; got != want {
				t.Errorf("after somebody, or something, has set %s: %s, want %s", set, got, want)
			}
			m.intervals[gpu0] = "Long"
			m.mu.Unlock()
		}
		end()
		n.unprepare(t, "a")
		n.check(t, is{})
	})
}
