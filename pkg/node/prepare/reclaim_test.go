package prepare

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// TestHolderWasPreparedAgain: a claim that was given up is prepared again just when another
// waits for its device. The holder releases nothing then, so the other has to look again.
func TestHolderWasPreparedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, err := journal.Open(t.TempDir(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		holder := holding.Record{ClaimUID: "a", Name: "a", BootID: "boot", Holdings: []holding.Holding{{Device: "d", GPU: "GPU-a"}}}
		if err := j.Put(holder); err != nil {
			t.Fatal(err)
		}
		p := New(Config{Journal: j, BootID: "boot"})
		holder.GivenUp = &health.Load{Boot: "boot"} // as it was
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begun := time.Now()
		for name, wait := range map[string]func(*wait) error{
			"for a device": func(w *wait) error {
				return p.waitForHolders(ctx, w, []holding.Record{holder}, p.calls.nextRelease())
			},
			"for memory": func(w *wait) error {
				s := &shortage{of: gpu.Whole{GPU: "GPU-a"}, there: 1, sharers: []holding.Record{holder}}
				return p.waitForMemory(ctx, w, s, p.calls.nextRelease())
			},
		} {
			w := newWait(ctx, holding.Record{ClaimUID: "b"})
			if err := wait(w); err != nil || time.Since(begun) > 0 {
				t.Errorf("waited %s for %s: %v, want another look at once", name, time.Since(begun), err)
			}
			w.cancel()
		}
	})
}
