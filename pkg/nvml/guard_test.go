package nvml

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// guarded calls a guard, and records which calls have begun and how they ended.
type guarded struct {
	*guard
	t     *testing.T
	begun []string
	end   map[string]chan struct{}
	ended map[string]error
}

// call makes a call in another goroutine. When call returns, it has begun, waits or has ended.
func (g *guarded) call(name string, as access, within time.Duration) {
	end := make(chan struct{})
	g.end[name] = end
	go func() {
		_, err := ask(g.guard, "GPU-0", as, name, within, func() (struct{}, error) {
			g.mu.Change(func() { g.begun = append(g.begun, name) })
			<-end
			return struct{}{}, nil
		})
		g.mu.Change(func() { g.ended[name] = err })
	}()
	synctest.Wait()
}

// returns lets the driver answer a call.
func (g *guarded) returns(name string) {
	close(g.end[name])
	synctest.Wait()
}

func (g *guarded) expectBegun(names ...string) {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.Equal(g.begun, names) {
		g.t.Errorf("%v have begun, want %v", g.begun, names)
	}
}

func (g *guarded) expectEnd(name string, want error) {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if err, ok := g.ended[name]; !ok || !errors.Is(err, want) {
		g.t.Errorf("%s: has ended: %t, %v; want %v", name, ok, err, want)
	}
}

func testGuard(t *testing.T, test func(*guarded)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		test(&guarded{guard: newGuard(), t: t, end: map[string]chan struct{}{}, ended: map[string]error{}})
	})
}

// TestChangeExcludesReads checks that a change waits for the calls under way, and that
// later ones wait for it, or aren't made.
func TestChangeExcludesReads(t *testing.T) {
	testGuard(t, func(g *guarded) {
		g.call("read 1", reads, time.Hour)
		g.call("read 2", reads, time.Hour)
		g.call("change 1", changes, time.Hour)
		g.call("change 2", changes, time.Hour)
		g.call("read 3", reads, time.Minute)
		g.call("probe 1", readsUnlessChanged, time.Minute)
		g.expectBegun("read 1", "read 2")
		g.expectEnd("probe 1", errBeingChanged)
		g.returns("read 1")
		g.expectBegun("read 1", "read 2")
		g.returns("read 2")
		first, second := "change 1", "change 2"
		if g.mu.Lock(); g.begun[2] == second {
			first, second = second, first
		}
		g.mu.Unlock()
		g.expectBegun("read 1", "read 2", first)
		g.call("probe 2", readsUnlessChanged, time.Minute)
		g.expectEnd("probe 2", errBeingChanged)
		time.Sleep(2 * time.Minute) // the limit of a call begins when the call does
		g.returns(first)
		g.expectBegun("read 1", "read 2", first, second)
		g.returns(second)
		g.expectBegun("read 1", "read 2", first, second, "read 3")
		g.returns("read 3")
		g.call("probe 3", readsUnlessChanged, time.Minute)
		g.expectBegun("read 1", "read 2", first, second, "read 3", "probe 3")
		g.returns("probe 3")
		for _, name := range []string{"read 1", "read 2", first, second, "read 3", "probe 3"} {
			g.expectEnd(name, nil)
		}
		if late := g.allLate(); len(late) > 0 {
			t.Errorf("%v don't respond", late)
		}
	})
}

// TestLateChange checks that a change that doesn't return in its time makes the calls fail
// that wait for it, and later ones at once, until it returns.
func TestLateChange(t *testing.T) {
	testGuard(t, func(g *guarded) {
		g.call("change", changes, time.Minute)
		g.call("read", reads, time.Hour)
		g.call("other change", changes, time.Hour)
		g.expectBegun("change")
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, name := range []string{"change", "read", "other change"} {
			g.expectEnd(name, ErrNotResponding)
		}
		g.call("probe", readsUnlessChanged, time.Hour)
		g.expectEnd("probe", ErrNotResponding)
		g.returns("change")
		g.call("later", reads, time.Hour)
		g.expectBegun("change", "later")
		g.returns("later")
		g.expectEnd("later", nil)
	})
}

// TestChangeWaitsForALateRead checks that a change isn't begun while a call for the same
// subject doesn't return.
func TestChangeWaitsForALateRead(t *testing.T) {
	testGuard(t, func(g *guarded) {
		g.call("read", reads, time.Minute)
		g.call("change", changes, time.Hour)
		time.Sleep(time.Minute)
		synctest.Wait()
		g.expectBegun("read")
		g.expectEnd("change", ErrNotResponding)
		g.returns("read")
		g.call("later", reads, time.Hour)
		g.expectBegun("read", "later")
		g.returns("later")
	})
}
