package partition_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

func TestReleaseInUseNamesTheHolder(t *testing.T) {
	n := newNode(t, newHardware())
	p := part(gpu0, "1g.18gb", 0)
	i := n.prepare(t, p)
	n.hw.outside(gpu0, func(g *simulated) { g.users[i.UUID] = 1 })
	wantError(t, n.Release(t.Context(), p), "in use by process 4242", "1g.18gb at memory slice 0")
	n.checkThere(t, gpu0, true, p)
	n.hw.outside(gpu0, func(g *simulated) { g.users = map[gpu.UUID]int{} })
	n.unprepare(t, p)
	n.checkThere(t, gpu0, true)
}

// TestReleaseWithoutHardware succeeds, so that the pod can go; the partition
// is destroyed when that is possible.
func TestReleaseWithoutHardware(t *testing.T) {
	p := part(gpu0, "1g.18gb", 0)
	for name, away := range map[string]func(*node) func(){
		"no driver": func(n *node) func() { n.SetHardware(nil); return func() { n.SetHardware(n.hw) } },
		"lost": func(n *node) func() {
			n.hw.outside(gpu0, func(g *simulated) { g.lost = true })
			return func() { n.hw.outside(gpu0, func(g *simulated) { g.lost = false }) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			n.prepare(t, p)
			back := away(n)
			n.unprepare(t, p)
			n.checkThere(t, gpu0, true, p)
			back()
			if err := n.Recover(t.Context()); err != nil {
				t.Error(err)
			}
			n.checkThere(t, gpu0, false)
		})
	}
}

// TestSessionIsNotTakenAwayUnderway checks that an operation keeps its session
// to its end, and a later one finds none.
func TestSessionIsNotTakenAwayUnderway(t *testing.T) {
	n := newNode(t, newHardware())
	p := part(gpu0, "1g.18gb", 0)
	n.hold(t, p)
	var closed atomic.Bool
	took := make(chan struct{})
	take := sync.OnceFunc(func() {
		go func() {
			n.SetHardware(nil)
			closed.Store(true)
			close(took)
		}()
	})
	n.hw.fault = func(call string, _ gpu.UUID) error {
		take()
		runtime.Gosched()
		if closed.Load() {
			t.Errorf("%s with a session that was taken away", call)
		}
		return nil
	}
	if _, err := n.Ensure(t.Context(), p); err != nil {
		t.Error(err)
	}
	<-took
	_, err := n.Ensure(t.Context(), p)
	wantError(t, err, "driver isn't there")
	n.checkThere(t, gpu0, true, p)
}

func TestWarmPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, newHardware())
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { n.Run(ctx); close(done) }()
		n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Minute})
		small, other, large, me := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6), part(gpu0, "3g.71gb", 0), part(gpu0, "1g.18gb+me", 4)

		n.prepare(t, small)
		n.unprepare(t, small)
		time.Sleep(50 * time.Second)
		synctest.Wait()
		writes := modified(t, n)
		n.prepare(t, small) // the same again costs nothing
		if n.hw.count("create") != 1 || modified(t, n) != writes {
			t.Errorf("%d made, want 1; record written again: %v", n.hw.count("create"), modified(t, n) != writes)
		}
		time.Sleep(time.Hour)
		n.checkThere(t, gpu0, true, small) // in use
		n.unprepare(t, small)
		n.prepare(t, large) // in its way
		n.checkThere(t, gpu0, true, large)
		n.unprepare(t, large)
		n.prepare(t, other)
		n.checkThere(t, gpu0, true, large, other)
		time.Sleep(2 * time.Minute) // over
		synctest.Wait()
		n.checkThere(t, gpu0, true, other)

		n.prepare(t, me)
		n.unprepare(t, me)
		n.prepare(t, part(gpu0, "1g.18gb+me", 5)) // wants its engine
		n.checkThere(t, gpu0, true, other, part(gpu0, "1g.18gb+me", 5))
		n.unprepare(t, other)
		n.unprepare(t, part(gpu0, "1g.18gb+me", 5))
		n.SetKeepWarm(nil)
		synctest.Wait()
		n.checkThere(t, gpu0, true)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		n.checkThere(t, gpu0, false)
		stop()
		<-done
	})
}

// TestReleaseOnAGPUThatDoesNotRespond: processes may still be there, so that the
// claim stays until the GPU responds again.
func TestReleaseOnAGPUThatDoesNotRespond(t *testing.T) {
	n := newNode(t, newHardware())
	p, other := part(gpu0, "1g.18gb", 0), part(gpu1, "1g.18gb", 0)
	n.prepare(t, p)
	n.prepare(t, other)
	n.hw.fault = func(_ string, uuid gpu.UUID) error {
		if uuid == gpu0 {
			return nvml.ErrNotResponding
		}
		return nil
	}
	if err := n.Release(t.Context(), p); !errors.Is(err, nvml.ErrNotResponding) {
		t.Errorf("release: %v, want %v", err, nvml.ErrNotResponding)
	}
	n.unprepare(t, other)
	n.hw.fault = nil
	n.unprepare(t, p)
	n.checkThere(t, gpu0, true)
}
