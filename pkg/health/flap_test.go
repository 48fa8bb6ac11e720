package health_test

import (
	"testing"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

var fellOff = gpu.Condition{Type: gpu.Lost, Message: "fell off the bus"}

// readAt reads a GPU every four seconds, as a sick one is read, and calls changed at each
// change of its conditions. lost says whether it is lost at a time since the start: then
// it must have the condition.
func readAt(t *testing.T, s health.State, from, to time.Duration, lost func(time.Duration) bool, changed func(at time.Duration, isLost bool)) health.State {
	for at := from; at < to; at += 4 * time.Second {
		before := isOpen(s)
		r := health.Reading{At: start.Add(at), Load: load, Vitals: &gpu.Vitals{Recovery: gpu.RecoveryNone}}
		if lost(at) {
			r.Vitals, r.Conditions = nil, []gpu.Condition{fellOff}
		}
		s = s.Observe(r)
		now := isOpen(s)
		if lost(at) && !now {
			t.Errorf("after %v the GPU is lost, and has no condition", at)
		}
		if now != before {
			changed(at, now)
		}
	}
	return s
}

// TestFlapping checks that a GPU that is lost and back all the time changes its condition
// seldom, and that the condition begins with the reading in which the GPU is lost.
func TestFlapping(t *testing.T) {
	for _, period := range []time.Duration{8 * time.Second, 20 * time.Second, time.Minute, 3 * time.Minute} {
		lost := func(at time.Duration) bool { return at%period < 4*time.Second }
		changes := map[int]int{} // by minute
		s := readAt(t, health.State{}, 0, time.Hour, lost, func(at time.Duration, isLost bool) {
			changes[int(at.Minutes())]++
			if isLost && !lost(at) {
				t.Errorf("every %v: after %v the GPU answers, and its condition begins", period, at)
			}
		})
		if !isOpen(s) {
			t.Errorf("every %v: the GPU is called healthy after an hour of this", period)
		}
		for minute, n := range changes {
			if n > 10 || minute > 0 && n > 4 || minute >= 30 {
				t.Errorf("every %v: %d changes in minute %d", period, n, minute)
			}
		}
	}
}

// TestFlappingEnds checks that a GPU is trusted again when it has been well for a while.
func TestFlappingEnds(t *testing.T) {
	var ended time.Duration
	note := func(at time.Duration, isLost bool) {
		if !isLost {
			ended = at
		}
	}
	often := func(at time.Duration) bool { return at%(20*time.Second) == 0 }
	s := readAt(t, health.State{}, 0, 10*time.Minute, often, note)
	never := func(time.Duration) bool { return false }
	s = readAt(t, s, 10*time.Minute, 20*time.Minute, never, note)
	if ended > 15*time.Minute {
		t.Errorf("the condition ended %v after the GPU was lost for the last time, want five minutes at most", ended-10*time.Minute)
	}
	s = readAt(t, s, 20*time.Minute, 30*time.Minute, never, note)
	if !s.Equal(health.State{}) {
		t.Errorf("a GPU that has been well for long has the state %+v", s)
	}
	once := func(at time.Duration) bool { return at == 30*time.Minute }
	readAt(t, s, 30*time.Minute, 31*time.Minute, once, note)
	if want := 30*time.Minute + 8*time.Second; ended != want {
		t.Errorf("a single loss later ended after %v, want %v", ended, want)
	}
}

// TestFlappingSurvivesRestart checks that a plugin that starts again and again doesn't
// trust a GPU sooner.
func TestFlappingSurvivesRestart(t *testing.T) {
	changes := 0
	lost := func(at time.Duration) bool { return at%(20*time.Second) == 0 }
	var s health.State
	for minute := range 60 {
		from := time.Duration(minute) * time.Minute
		s = readAt(t, restart(t, s, start), from, from+time.Minute, lost, func(time.Duration, bool) { changes++ })
	}
	if changes > 12 {
		t.Errorf("%d changes in an hour", changes)
	}
}

// TestEndOfFlappingByHand checks that an admin ends the condition of a GPU that answers
// again, and that it is back when the GPU is lost again.
func TestEndOfFlappingByHand(t *testing.T) {
	healthy := func(time.Duration) bool { return false }
	lost := func(time.Duration) bool { return true }
	ignore := func(time.Duration, bool) {}
	s := readAt(t, health.State{}, 0, time.Hour, func(at time.Duration) bool { return at%(20*time.Second) == 0 }, ignore)
	s = readAt(t, s, time.Hour, time.Hour+8*time.Second, healthy, ignore)
	s, err := s.End(health.Ending{Type: gpu.Lost, By: "ann", Why: "the riser was seated again", At: start.Add(time.Hour)}, start.Add(time.Hour))
	if err != nil || isOpen(s) {
		t.Fatalf("ended by hand: %v, %v", s.Conditions(), err)
	}
	if s = readAt(t, s, time.Hour+8*time.Second, time.Hour+12*time.Second, lost, ignore); len(s.Conditions()) != 1 {
		t.Error("the GPU is lost again and has no condition")
	}
	if s = readAt(t, s, time.Hour+12*time.Second, time.Hour+20*time.Second, healthy, ignore); isOpen(s) {
		t.Error("after an end by hand the GPU isn't trusted as at first")
	}
}

func isOpen(s health.State) bool { return len(s.Conditions()) > 0 }
