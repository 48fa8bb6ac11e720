package healthmonitor

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/nodetest"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

// TestSettingsAreCheckedEachMinute: those of a GPU of which a claim needs a setting.
func TestSettingsAreCheckedEachMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := monitorOf(t, false, shared)
		claim := holding.Record{ClaimUID: "a", BootID: "boot", Holdings: []holding.Holding{{GPU: shared, TimeSlice: "Long"}}}
		if err := m.cfg.Journal.Put(claim); err != nil {
			t.Fatal(err)
		}
		m.cfg.Sharing = sharing.New(sharing.Config{
			Journal: m.cfg.Journal, BootID: "boot", Prepared: []string{"a"}, Daemons: nodetest.NewDaemons(t.TempDir(), "/run/mps/d"),
		})
		var checks atomic.Int32
		m.cfg.Sharing.SetHardware(nil, func(_ context.Context, args ...string) (string, error) {
			if slices.Contains(args, "--list") {
				checks.Add(1)
			}
			return "|   0   Timeslice       Long          |\n", nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { m.cfg.Sharing.Run(ctx) })
		running.Go(func() { m.doTasks(ctx) })
		time.Sleep(5*time.Minute + time.Second)
		if got := checks.Load(); got != 5 {
			t.Errorf("checked %d times in five minutes, want 5", got)
		}
		cancel()
		running.Wait()
	})
}
