package facts

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestOutdated: whatever keeps the plugin from looking at the GPUs, the facts don't
// count as true for longer than the limit.
func TestOutdated(t *testing.T) {
	const after, askEvery = 20 * time.Second, 5 * time.Second
	const firstUUID, secondUUID = "GPU-980fb007-8a10-0135-bada-13f71feaef21", "GPU-08779614-8a10-0135-bada-13f71feaef21"
	first, second := gpu.GPU{UUID: firstUUID}, gpu.GPU{UUID: secondUUID}
	hung := gpu.GPU{UUID: secondUUID, Conditions: []gpu.Condition{{Type: gpu.NotResponding, Message: "hangs"}}}
	for name, tc := range map[string]struct {
		// do happens after the first look; every five seconds the GPUs are asked, and
		// silent don't answer. notAsked: that hangs itself.
		do       func(*Facts)
		silent   []string
		notAsked bool
		// undo ends it.
		undo func(*Facts)
	}{
		"the GPUs aren't asked": {notAsked: true},
		"a GPU is silent, and the facts don't say so": {
			silent: []string{secondUUID},
			undo:   func(f *Facts) { found(t, f, first, hung) },
		},
		"a reading is requested and doesn't begin": {
			do:   func(f *Facts) { f.Reread() },
			undo: func(f *Facts) { f.BeginReading(); found(t, f, first, second) },
		},
		"a reading doesn't end": {
			do:   func(f *Facts) { f.Reread(); f.BeginReading() },
			undo: func(f *Facts) { found(t, f, first, second) },
		},
		"the driver isn't found again": {
			do:   func(f *Facts) { f.BeginReading() },
			undo: func(f *Facts) { f.Missing(ReasonNVMLError, "no driver") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := New("node-0")
				if err := f.Outdated(after); err != nil {
					t.Errorf("before the first look: %v", err)
				}
				found(t, f, first, second)
				look := func(silent ...string) { time.Sleep(askEvery); f.Looked(time.Now(), silent) }
				for range 60 {
					look()
					if err := f.Outdated(after); err != nil {
						t.Fatalf("while the GPUs are asked every %s: %v", askEvery, err)
					}
				}
				if tc.do != nil {
					tc.do(f)
				}
				for began := time.Now(); time.Since(began) <= after; {
					time.Sleep(askEvery)
					if !tc.notAsked {
						f.Looked(time.Now(), tc.silent)
					}
				}
				err := f.Outdated(after)
				if err == nil {
					t.Fatalf("after %s the facts count as true", after+askEvery)
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

func found(t *testing.T, f *Facts, gpus ...gpu.GPU) {
	t.Helper()
	f.Found(gpu.Node{Name: "node-0", GPUs: gpus})
}
