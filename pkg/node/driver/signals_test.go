package driver

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestStuck: a probe notices that the look at the hardware doesn't end.
func TestStuck(t *testing.T) {
	const after = 3 * time.Minute
	synctest.Test(t, func(t *testing.T) {
		f := New(Config{Signals: NewSignals()})
		if err := f.Stuck(after); err != nil {
			t.Errorf("before the first look: %v", err)
		}
		for range 10 { // each pause between two looks is a sign of life
			f.pause(t.Context(), rereadEvery)
			if err := f.Stuck(after); err != nil {
				t.Errorf("after a pause: %v", err)
			}
		}
		<-time.After(after + time.Second)
		if err := f.Stuck(after); err == nil || !strings.Contains(err.Error(), "hardware") {
			t.Errorf("after a look of more than %s: %v, want an error", after, err)
		}
	})
}
