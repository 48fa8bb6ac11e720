package health_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/pkg/clocktest"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// TestSetClock: a cause ends when two readings agree, however the clock is set while it is
// open, between the readings, or while the plugin is restarted.
func TestSetClock(t *testing.T) {
	asks, silent := &gpu.Vitals{Recovery: gpu.RecoveryReset}, &gpu.Vitals{Recovery: gpu.RecoveryNone}
	for name, by := range map[string]time.Duration{"forwards": 3 * time.Hour, "back": -3 * time.Hour} {
		for set := range 3 { // before which reading
			for _, restarted := range []bool{false, true} {
				t.Run(name, func(t *testing.T) {
					now, s := time.Now(), health.State{}
					for i, vitals := range []*gpu.Vitals{asks, silent, silent} {
						at := now.Add(time.Duration(i) * 4 * time.Second)
						if i >= set {
							at = clocktest.Shift(at, by)
						}
						if restarted && i == 1 {
							s = reloaded(t, s)
						}
						s = s.Observe(health.Reading{At: at, Load: health.Load{Boot: "a", Driver: "b"}, Vitals: vitals})
						if want := i < 2; want != (len(s.Conditions()) == 1) {
							t.Fatalf("the clock was set before reading %d, restarted: %t: after reading %d the conditions are %v", set, restarted, i, s.Conditions())
						}
					}
				})
			}
		}
	}
}

// TestEndAfterTheClockWasSetBack: a cause that seems to begin later can be ended with its
// own time, which the error names.
func TestEndAfterTheClockWasSetBack(t *testing.T) {
	now := time.Now()
	s := health.State{}.Observe(health.Reading{At: now, Vitals: &gpu.Vitals{Recovery: gpu.RecoveryReset}})
	s = reloaded(t, s)
	ending := health.Ending{Type: gpu.ResetRequired, At: now.Add(-3 * time.Hour), By: "ann", Why: "tested it"}
	if _, err := s.End(ending, ending.At); err == nil {
		t.Error("a cause that begins later was ended")
	}
	s, err := s.End(ending, s.Causes[0].Since)
	if err != nil || len(s.Conditions()) > 0 {
		t.Errorf("got %v, conditions %v", err, s.Conditions())
	}
}

// reloaded returns a state as the next plugin reads it.
func reloaded(t *testing.T, s health.State) (out health.State) {
	t.Helper()
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}
