package driver

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/clocktest"
	"github.com/tessera-dra/tessera/pkg/node/facts"
)

// TestStuck: a probe notices that the look at the hardware doesn't end.
func TestStuck(t *testing.T) {
	const after = 3 * time.Minute
	synctest.Test(t, func(t *testing.T) {
		f := New(Config{Facts: facts.New("node-0")})
		if err := f.Stuck(after); err != nil {
			t.Errorf("before the first look: %v", err)
		}
		for range 10 { // each pause between two looks is a sign of life
			f.pause(t.Context(), rereadEvery)
			if err := f.Stuck(0); err != nil {
				t.Errorf("after a pause: %v", err)
			}
		}
		<-time.After(after + time.Second)
		if err := f.Stuck(after); err == nil || !strings.Contains(err.Error(), "hardware") {
			t.Errorf("after a look of more than %s: %v, want an error", after, err)
		}
	})
}

// TestHeartbeatOfASetClock: a clock that is set makes no loop look stuck, or alive.
func TestHeartbeatOfASetClock(t *testing.T) {
	for _, by := range []time.Duration{3 * time.Hour, -3 * time.Hour} {
		var h heartbeat
		now := time.Now()
		h.last.Store(&now)
		if got := h.age(clocktest.Shift(now.Add(time.Minute), by)); got != time.Minute {
			t.Errorf("the clock was set by %v: the last beat was %v ago, want a minute", by, got)
		}
	}
}
