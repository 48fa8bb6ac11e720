package clocktest_test

import (
	"testing"
	"time"

	"github.com/tessera-dra/tessera/pkg/clocktest"
)

func TestShift(t *testing.T) {
	now := time.Now()
	for _, by := range []time.Duration{0, time.Second, 3 * time.Hour, -time.Second, -3 * time.Hour} {
		set := clocktest.Shift(now, by)
		if got := set.Sub(now); got != 0 {
			t.Errorf("%v: %v later, want 0", by, got)
		}
		if got := set.Round(0).Sub(now.Round(0)); got != by {
			t.Errorf("%v: the clock shows %v later", by, got)
		}
		if got := set.Add(time.Minute).Sub(now); got != time.Minute {
			t.Errorf("%v: %v later, want a minute", by, got)
		}
	}
}
