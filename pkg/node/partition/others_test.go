package partition_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// TestOthersInstances are used where they are what is wanted, and stay.
func TestOthersInstances(t *testing.T) {
	n := newNode(t, newHardware())
	theirs, ours := part(gpu0, "3g.71gb", 0), part(gpu0, "1g.18gb", 6)
	foreign := n.hw.foreign(theirs, true)
	if got := n.prepare(t, theirs); got != foreign {
		t.Errorf("got %v, want the one there is, %v", got, foreign)
	}
	n.prepare(t, ours)
	wantError(t, n.ClearMIG(t.Context(), gpu0), "is divided for another claim")
	n.unprepare(t, theirs)
	n.unprepare(t, ours)
	wantError(t, n.ClearMIG(t.Context(), gpu0), "3g.71gb", "not made by Tessera")
	if err := n.LeaveHost(t.Context()); err != nil {
		t.Error(err)
	}
	n.checkThere(t, gpu0, true, theirs)
	n.hw.outside(gpu0, func(g *simulated) { g.mig.Instances = nil })
	wantError(t, n.ClearMIG(t.Context(), gpu0), "Tessera didn't switch it on", "-mig 0")
	n.checkThere(t, gpu0, true)
}

// TestSomebodyElseIsQuicker has an instance of others appear between the
// intent and the making.
func TestSomebodyElseIsQuicker(t *testing.T) {
	for _, whole := range []bool{true, false} {
		n := newNode(t, newHardware())
		p := part(gpu0, "1g.18gb", 4)
		n.hold(t, p)
		once := sync.OnceFunc(func() { n.hw.foreign(p, whole) })
		n.hw.fault = func(call string, _ gpu.UUID) error {
			if call == "create" {
				once()
			}
			return nil
		}
		_, err := n.Ensure(t.Context(), p)
		wantError(t, err, "insufficient", "GPU instance 11 (1g.18gb at memory slice 4", "(not made by Tessera)")
		n.unprepare(t, p)
		n = n.restart(t, "boot-1")
		if err := n.LeaveHost(t.Context()); err != nil {
			t.Error(err)
		}
		n.checkThere(t, gpu0, true, p)
	}
}

func TestDestroyedFromOutside(t *testing.T) {
	p := part(gpu0, "1g.18gb", 0)
	for name, tc := range map[string]struct {
		outside func(*simulated)
		then    func(*testing.T, *node)
	}{
		"released":   {func(g *simulated) { g.mig.Instances = nil }, func(t *testing.T, n *node) { n.unprepare(t, p) }},
		"made again": {func(g *simulated) { g.mig.Instances = nil }, func(t *testing.T, n *node) { n.prepare(t, p); n.unprepare(t, p) }},
		"compute instance only": {
			func(g *simulated) {
				g.mig.Instances[0].UUID, g.mig.Instances[0].ComputeInstanceID = "", gpu.NoComputeInstance
			},
			func(t *testing.T, n *node) { n.prepare(t, p); n.unprepare(t, p) },
		},
		"mode too": {
			func(g *simulated) { g.mig.Instances, g.mig.Enabled, g.mig.Pending = nil, false, false },
			func(t *testing.T, n *node) { n.prepare(t, p); n.unprepare(t, p) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			n.prepare(t, p)
			n.hw.outside(gpu0, tc.outside)
			tc.then(t, n)
			if err := n.LeaveHost(t.Context()); err != nil {
				t.Error(err)
			}
			n.checkThere(t, gpu0, false)
		})
	}
}

// TestHalfDestroyed has the hardware answer that the compute instance is gone
// while the GPU instance is still there.
func TestHalfDestroyed(t *testing.T) {
	n := newNode(t, newHardware())
	p := part(gpu0, "1g.18gb", 0)
	n.prepare(t, p)
	n.hw.fault = func(call string, _ gpu.UUID) error {
		if call != "destroy" {
			return nil
		}
		n.hw.outside(gpu0, func(g *simulated) {
			g.mig.Instances[0].UUID, g.mig.Instances[0].ComputeInstanceID = "", gpu.NoComputeInstance
		})
		return nvml.ErrNotFound
	}
	wantError(t, n.Release(t.Context(), p), "not found")
	n.hw.fault = nil
	n.unprepare(t, p)
	n.checkThere(t, gpu0, true)
}

// TestReplacedFromOutside has another's instance in our instance's place.
func TestReplacedFromOutside(t *testing.T) {
	n := newNode(t, newHardware())
	p, theirs := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb+me", 0)
	n.prepare(t, p)
	n.hw.outside(gpu0, func(g *simulated) { g.mig.Instances = nil })
	n.hw.foreign(theirs, true)
	n.unprepare(t, p)
	n = n.restart(t, "boot-1")
	n.checkThere(t, gpu0, true, theirs)
}

// TestModeStaysOnForOthers who made an instance under the mode we switched.
func TestModeStaysOnForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, newHardware())
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { n.Run(ctx); close(done) }()
		p, theirs := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6)
		n.prepare(t, p)
		n.hw.foreign(theirs, true)
		n.unprepare(t, p)
		time.Sleep(time.Hour)
		synctest.Wait()
		n.checkThere(t, gpu0, true, theirs)
		if looks := n.hw.count("look"); looks > 100 {
			t.Errorf("%d looks in an hour", looks)
		}
		n.hw.outside(gpu0, func(g *simulated) { g.mig.Instances = nil })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		n.checkThere(t, gpu0, false)
		stop()
		<-done
	})
}
