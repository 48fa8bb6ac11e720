package partition_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

func TestMakeAndRelease(t *testing.T) {
	n := newNode(t, newHardware())
	a, b := part(gpu0, "1g.18gb", 6), part(gpu0, "3g.71gb", 0)
	first := n.prepare(t, a)
	n.prepare(t, b)
	n.checkThere(t, gpu0, true, a, b)
	if again := n.prepare(t, a); again != first {
		t.Errorf("made again: got %v, want %v", again, first)
	}
	if found, err := n.Find(t.Context(), a); err != nil || found != first {
		t.Errorf("found %v, %v, want %v", found, err, first)
	}
	n.unprepare(t, b)
	n.checkThere(t, gpu0, true, a)
	n.unprepare(t, a)
	n.unprepare(t, a)
	if err := n.LeaveHost(t.Context()); err != nil {
		t.Error(err)
	}
	n.checkThere(t, gpu0, false)
	if got := n.journal.GPUs(); len(got) > 0 {
		t.Errorf("records left: %v", got)
	}
}

// TestMetrics checks that the time of the hardware is separate from our own.
func TestMetrics(t *testing.T) {
	hw := newHardware()
	j, err := journal.Open(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	registry := prometheus.NewRegistry()
	n := &node{hw: hw, journal: j, Manager: partition.New(partition.Config{Journal: j, Specs: cdi.New(cdi.Config{}), Facts: facts.New("node-0"), BootID: "boot-1", Registerer: registry})}
	n.SetHardware(hw)
	n.prepare(t, part(gpu0, "1g.18gb", 0))
	n.prepare(t, part(gpu0, "1g.18gb", 1))
	n.unprepare(t, part(gpu0, "1g.18gb", 1))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			got[name] = float64(m.GetHistogram().GetSampleCount()) + m.GetGauge().GetValue()
		}
	}
	want := map[string]float64{
		"tessera_mig_hardware_duration_seconds look success": 3, "tessera_mig_hardware_duration_seconds mode success": 1,
		"tessera_mig_hardware_duration_seconds create success": 2, "tessera_mig_hardware_duration_seconds destroy success": 1,
		"tessera_mig_own_duration_seconds make success": 2, "tessera_mig_own_duration_seconds release success": 1,
		"tessera_mig_partitions": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestMakeIsRefused(t *testing.T) {
	want := part(gpu0, "1g.18gb", 0)
	for name, tc := range map[string]struct {
		prepare func(*testing.T, *node)
		words   []string
	}{
		"others' in the way": {
			func(_ *testing.T, n *node) { n.hw.foreign(part(gpu0, "3g.71gb", 0), true) },
			[]string{"GPU instance 1 (3g.71gb at memory slices 0-3)", "didn't create", "-dgi -gi 1"},
		},
		"others' of the same, without compute instance": {
			func(_ *testing.T, n *node) { n.hw.foreign(want, false) },
			[]string{"GPU instance 7", "didn't create"},
		},
		"held in the way": {
			func(t *testing.T, n *node) { n.prepare(t, part(gpu0, "3g.71gb", 0)) },
			[]string{"3g.71gb", "claim default/claim-980fb007-3g.71gb-0"},
		},
		"mode pends": {
			func(_ *testing.T, n *node) { n.hw.outside(gpu0, func(g *simulated) { g.mig.Pending = true }) },
			[]string{"pending", "reset the GPU"},
		},
		"not switchable": {
			func(_ *testing.T, n *node) { n.hw.outside(gpu0, func(g *simulated) { g.mig.Switchable = false }) },
			[]string{"MIG mode is off", "-mig 1"},
		},
		"GPU in use": {
			func(_ *testing.T, n *node) { n.hw.outside(gpu0, func(g *simulated) { g.users[""] = 1 }) },
			[]string{"in use by process 4243"},
		},
		"engine in use": {
			func(_ *testing.T, n *node) {
				n.hw.foreign(part(gpu0, "1g.18gb", 6), true)
				n.hw.fault = func(call string, _ gpu.UUID) error {
					if call == "create" {
						return nvml.ErrInsufficientResources
					}
					return nil
				}
			},
			[]string{"insufficient", "GPU instance 13 (1g.18gb at memory slice 6) (not made by Tessera)"},
		},
		"lost": {
			func(_ *testing.T, n *node) { n.hw.outside(gpu0, func(g *simulated) { g.lost = true }) },
			[]string{"GPU is lost"},
		},
		"no driver": {
			func(_ *testing.T, n *node) { n.SetHardware(nil) },
			[]string{"driver isn't there"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			tc.prepare(t, n)
			before, records := n.hw.now(gpu0), n.journal.GPUs()
			n.hold(t, want)
			_, err := n.Ensure(t.Context(), want)
			wantError(t, err, append(tc.words, "1g.18gb at memory slice 0 of GPU "+string(gpu0))...)
			if diff := cmp.Diff(before, n.hw.now(gpu0)); diff != "" {
				t.Errorf("hardware changed:\n%s", diff)
			}
			if diff := cmp.Diff(records, n.journal.GPUs()); diff != "" {
				t.Errorf("records changed:\n%s", diff)
			}
		})
	}
}

func TestComputeInstanceFails(t *testing.T) {
	for name, undoFails := range map[string]bool{"undone": false, "undo fails": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			p := part(gpu0, "1g.18gb", 0)
			n.hold(t, p)
			n.hw.fault = func(call string, _ gpu.UUID) error {
				if call == "createCompute" || undoFails && (call == "undo" || call == "destroy") {
					return errors.New("broken")
				}
				return nil
			}
			_, err := n.Ensure(t.Context(), p)
			wantError(t, err, "broken")
			n.hw.fault = nil
			n.prepare(t, p)
			n.checkThere(t, gpu0, true, p)
			n.unprepare(t, p)
			if err := n.LeaveHost(t.Context()); err != nil {
				t.Error(err)
			}
			n.checkThere(t, gpu0, false)
		})
	}
}

func TestWhole(t *testing.T) {
	n := newNode(t, newHardware())
	n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Hour})
	a, b := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6)
	n.prepare(t, a)
	n.prepare(t, b)
	n.unprepare(t, a)
	n.checkThere(t, gpu0, true, a, b)
	wantError(t, n.ClearMIG(t.Context(), gpu0), "claim default/claim-980fb007-1g.18gb-6", "use GPU "+string(gpu0)+" whole")
	n.unprepare(t, b)
	n.hold(t, gpu.Whole{GPU: gpu0})
	n.hw.outside(gpu0, func(g *simulated) { g.users[""] = 1 })
	wantError(t, n.ClearMIG(t.Context(), gpu0), "in use by process 4243")
	n.hw.outside(gpu0, func(g *simulated) { g.users = map[gpu.UUID]int{} })
	for range 2 {
		if err := n.ClearMIG(t.Context(), gpu0); err != nil {
			t.Error(err)
		}
		n.checkThere(t, gpu0, false)
	}
	if got := n.journal.GPUs(); len(got) > 0 {
		t.Errorf("records left: %v", got)
	}
	n.hw.fault = func(string, gpu.UUID) error { return nvml.ErrNotSupported }
	if err := n.ClearMIG(t.Context(), gpu1); err != nil {
		t.Errorf("a GPU without MIG: %v", err)
	}
}

// TestModeIsTriedAgain has a process keep MIG mode from being switched off.
func TestModeIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, newHardware())
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { n.Run(ctx); close(done) }()
		p := part(gpu0, "1g.18gb", 0)
		n.prepare(t, p)
		n.hw.outside(gpu0, func(g *simulated) { g.users[""] = 1 })
		n.unprepare(t, p)
		time.Sleep(time.Hour)
		synctest.Wait()
		n.checkThere(t, gpu0, true)
		if tries := n.hw.count("mode"); tries < 30 || tries > 70 {
			t.Errorf("%d tries in an hour", tries)
		}
		n.hw.outside(gpu0, func(g *simulated) { g.users = map[gpu.UUID]int{} })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		n.checkThere(t, gpu0, false)
		stop()
		<-done
	})
}

func TestFindNeverMakes(t *testing.T) {
	n := newNode(t, newHardware())
	_, err := n.Find(t.Context(), part(gpu0, "1g.18gb", 0))
	wantError(t, err, "admin access never makes one")
	if n.hw.count("create")+n.hw.count("mode") > 0 {
		t.Errorf("calls: %v", n.hw.calls)
	}
}

// TestWaitingEndsWithTheContext while the GPU is busy, and other GPUs don't
// wait at all.
func TestWaitingEndsWithTheContext(t *testing.T) {
	n := newNode(t, newHardware())
	busy, release := make(chan struct{}), make(chan struct{})
	n.hw.fault = func(call string, uuid gpu.UUID) error {
		if call == "create" && uuid == gpu0 {
			close(busy)
			<-release
		}
		return nil
	}
	var wg sync.WaitGroup
	wg.Go(func() { n.prepare(t, part(gpu0, "1g.18gb", 0)) })
	<-busy
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("unprepared"))
	_, err := n.Ensure(ctx, part(gpu0, "1g.18gb", 1))
	wantError(t, err, "unprepared", "wait")
	n.prepare(t, part(gpu1, "1g.18gb", 0))
	close(release)
	wg.Wait()
	n.checkThere(t, gpu0, true, part(gpu0, "1g.18gb", 0))
}

// TestChurn has seven claims come and go on each of two GPUs while the node is
// read again and again: the facts never change.
func TestChurn(t *testing.T) {
	n := newNode(t, newHardware())
	theirs := part(gpu1, "1g.18gb", 6)
	foreign := n.hw.foreign(theirs, true)
	ctx, stop := context.WithCancel(t.Context())
	var background, claims sync.WaitGroup
	background.Go(func() { n.Run(ctx) })
	for uuid, most := range map[gpu.UUID]int{gpu0: 7, gpu1: 6} {
		for s := range most {
			claims.Go(func() {
				p := part(uuid, "1g.18gb", s)
				for range 8 {
					n.prepare(t, p)
					n.unprepare(t, p)
				}
			})
		}
	}
	background.Go(func() {
		for ctx.Err() == nil {
			checkRead(t, n, foreign)
		}
	})
	claims.Wait()
	checkRead(t, n, foreign)
	stop()
	background.Wait()
	if err := n.LeaveHost(t.Context()); err != nil {
		t.Error(err)
	}
	n.checkThere(t, gpu0, false)
	n.checkThere(t, gpu1, true, theirs)
}

// TestAnotherBoot has others make, after a reboot, the very instance that we
// had before it: it is theirs, also before Recover has run.
func TestAnotherBoot(t *testing.T) {
	for name, recovered := range map[string]bool{"recovered": true, "not recovered": false} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			p := part(gpu0, "1g.18gb", 0)
			before := n.prepare(t, p)
			n.hw.reboot()
			if got, _ := n.journal.GPU(gpu0); len(got.Partitions) != 1 || got.Partitions[0].Made.UUID != before.UUID {
				t.Errorf("created: %+v, want %s", got, before.UUID)
			}
			if again := n.hw.foreign(p, true); again != before {
				t.Fatalf("the hardware made %v, want %v again", again, before)
			}
			if recovered {
				n = n.restart(t, "boot-2")
			} else {
				n.journal.Close()
				n = start(t, n.hw, n.dir, "boot-2", nil)
			}
			n.prepare(t, p)
			n.unprepare(t, p)
			if err := n.LeaveHost(t.Context()); err != nil {
				t.Error(err)
			}
			n.checkThere(t, gpu0, true, p)
			if got := n.journal.GPUs(); len(got) > 0 {
				t.Errorf("records: %v", got)
			}
		})
	}
}
