package driver

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
)

// TestOutdated: whatever keeps the plugin from looking at the GPUs, the facts don't
// count as true for longer than the limit.
func TestOutdated(t *testing.T) {
	const after = 20 * time.Second
	const firstUUID, secondUUID = "GPU-980fb007-8a10-0135-bada-13f71feaef21", "GPU-08779614-8a10-0135-bada-13f71feaef21"
	first, second := gpu.GPU{UUID: firstUUID}, gpu.GPU{UUID: secondUUID}
	hung := gpu.GPU{UUID: secondUUID, Conditions: []gpu.Condition{{Type: gpu.NotResponding, Message: "hangs"}}}
	for name, tc := range map[string]struct {
		// do happens after the first look; every five seconds the GPUs are asked, and
		// silent don't answer. notAsked: that hangs itself.
		do       func(*Follower)
		silent   []string
		notAsked bool
		// undo ends it.
		undo func(*Follower)
	}{
		"the GPUs aren't asked": {notAsked: true},
		"a GPU is silent, and the facts don't say so": {
			silent: []string{secondUUID},
			undo:   func(f *Follower) { found(t, f, first, hung) },
		},
		"a reading is requested and doesn't begin": {
			do:   func(f *Follower) { f.cfg.Signals.Wake() },
			undo: func(f *Follower) { f.beginReading(); f.endReading() },
		},
		"a reading doesn't end": {
			do:   func(f *Follower) { f.cfg.Signals.Wake(); f.beginReading() },
			undo: func(f *Follower) { f.endReading() },
		},
		"the driver isn't found again": {
			do:   func(f *Follower) { f.beginReading() },
			undo: func(f *Follower) { f.lose(t.Context(), errOtherLibrary) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := New(Config{Signals: NewSignals(), Facts: facts.New("node-0")})
				if err := f.Outdated(after); err != nil {
					t.Errorf("before the first look: %v", err)
				}
				found(t, f, first, second)
				look := func(silent ...string) { time.Sleep(probeEvery); f.probed(time.Now(), silent) }
				for range 60 {
					look()
					if err := f.Outdated(after); err != nil {
						t.Fatalf("while the GPUs are asked every %s: %v", probeEvery, err)
					}
				}
				if tc.do != nil {
					tc.do(f)
				}
				for began := time.Now(); time.Since(began) <= after; {
					time.Sleep(probeEvery)
					if !tc.notAsked {
						f.probed(time.Now(), tc.silent)
					}
				}
				err := f.Outdated(after)
				if err == nil {
					t.Fatalf("after %s the facts count as true", after+probeEvery)
				}
				time.Sleep(time.Minute)
				if later := f.Outdated(after); later == nil || later.Error() != err.Error() {
					t.Errorf("a minute later: %v, want what it was: %v", later, err)
				}
				if tc.undo != nil {
					tc.undo(f)
				}
				look(tc.silent...)
				if err := f.Outdated(after); err != nil {
					t.Errorf("after it has ended: %v", err)
				}
			})
		})
	}
}

func found(t *testing.T, f *Follower, gpus ...gpu.GPU) {
	t.Helper()
	f.cfg.Facts.Found(gpu.Node{Name: "node-0", GPUs: gpus})
}
