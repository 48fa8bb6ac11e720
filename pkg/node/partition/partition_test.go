package partition_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

var _ partition.Hardware = (*nvml.Session)(nil)

// node is a plugin's partitions with the journal and the hardware below.
type node struct {
	*partition.Manager
	hw      *hardware
	journal *journal.Journal
	claims  *holding.Claims
	dir     string
}

func newNode(t testing.TB, hw *hardware) *node {
	return start(t, hw, t.TempDir(), "boot-1", nil)
}

func start(t testing.TB, hw *hardware, dir, boot string, step func(string)) *node {
	t.Helper()
	j, err := journal.Open(dir, step)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	claims := holding.NewClaims(j)
	n := &node{hw: hw, journal: j, claims: claims, dir: dir, Manager: partition.New(partition.Options{Journal: j, Claims: claims, BootID: boot, Step: step, Registerer: prometheus.NewRegistry()})}
	n.SetHardware(hw)
	return n
}

// restart does the steps of a new start of the plugin.
func (n *node) restart(t testing.TB, boot string) *node {
	t.Helper()
	n.journal.Close()
	again := start(t, n.hw, n.dir, boot, nil)
	if err := again.Recover(t.Context()); err != nil {
		t.Errorf("recover: %v", err)
	}
	return again
}

// hold is the first half of a prepare: the claim's record.
func (n *node) hold(t testing.TB, d gpu.Device) {
	t.Helper()
	r := holding.Record{ClaimUID: uid(d), Namespace: "default", Name: uid(d), BootID: "boot-1", Holdings: []holding.Holding{{Device: "d", GPU: d.Parent(), Partition: holding.PartitionOf(d)}}}
	if err := n.journal.Put(r); err != nil {
		t.Fatal(err)
	}
	n.claims.SetStaying(r.ClaimUID)
}

// Release is as in an unprepare: of a claim that is leaving.
func (n *node) Release(ctx context.Context, p gpu.Partition) error {
	n.claims.SetLeaving(uid(p))
	return n.Manager.Release(ctx, p)
}

func uid(d gpu.Device) string {
	p, _ := d.(gpu.Partition)
	return fmt.Sprintf("claim-%s-%s-%d", d.Parent()[4:12], strings.ReplaceAll(p.Profile, "+", ""), p.Placement.Start)
}

func (n *node) prepare(t testing.TB, p gpu.Partition) gpu.Instance {
	t.Helper()
	n.hold(t, p)
	i, err := n.Make(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if i.UUID == "" || i.Profile != p.Profile || i.Placement != p.Placement {
		t.Fatalf("made %v, want %v", i, p)
	}
	return i
}

func (n *node) unprepare(t testing.TB, p gpu.Partition) {
	t.Helper()
	if err := errors.Join(n.Release(t.Context(), p), n.journal.Delete(uid(p))); err != nil {
		t.Fatal(err)
	}
}

// checkThere checks what is on a GPU.
func (n *node) checkThere(t testing.TB, uuid gpu.UUID, on bool, want ...gpu.Partition) {
	t.Helper()
	mig := n.hw.now(uuid)
	got := map[gpu.Partition]bool{}
	for _, i := range mig.Instances {
		got[gpu.Partition{GPU: uuid, Profile: i.Profile, Placement: i.Placement}] = true
	}
	wanted := map[gpu.Partition]bool{}
	for _, p := range want {
		wanted[p] = true
	}
	if diff := cmp.Diff(wanted, got); diff != "" {
		t.Errorf("instances on %s (-want +got):\n%s", uuid, diff)
	}
	if mig.Enabled != on || mig.Pending != on {
		t.Errorf("MIG mode of %s: got %v (pending %v), want %v", uuid, mig.Enabled, mig.Pending, on)
	}
}

func wantError(t testing.TB, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one that says %q", words)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q doesn't say %q", err, w)
		}
	}
}

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
	if err := n.Leave(t.Context()); err != nil {
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
	claims := holding.NewClaims(j)
	n := &node{hw: hw, journal: j, claims: claims, Manager: partition.New(partition.Options{Journal: j, Claims: claims, BootID: "boot-1", Registerer: registry})}
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
			_, err := n.Make(t.Context(), want)
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

// TestOthersInstances are used where they are what is wanted, and stay.
func TestOthersInstances(t *testing.T) {
	n := newNode(t, newHardware())
	theirs, ours := part(gpu0, "3g.71gb", 0), part(gpu0, "1g.18gb", 6)
	foreign := n.hw.foreign(theirs, true)
	if got := n.prepare(t, theirs); got != foreign {
		t.Errorf("got %v, want the one there is, %v", got, foreign)
	}
	n.prepare(t, ours)
	wantError(t, n.Whole(t.Context(), gpu0), "it is divided")
	n.unprepare(t, theirs)
	n.unprepare(t, ours)
	wantError(t, n.Whole(t.Context(), gpu0), "3g.71gb", "not made by Tessera")
	if err := n.Leave(t.Context()); err != nil {
		t.Error(err)
	}
	n.checkThere(t, gpu0, true, theirs)
	n.hw.outside(gpu0, func(g *simulated) { g.mig.Instances = nil })
	wantError(t, n.Whole(t.Context(), gpu0), "Tessera didn't switch it on", "-mig 0")
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
		_, err := n.Make(t.Context(), p)
		wantError(t, err, "insufficient", "GPU instance 11 (1g.18gb at memory slice 4", "(not made by Tessera)")
		n.unprepare(t, p)
		n = n.restart(t, "boot-1")
		if err := n.Leave(t.Context()); err != nil {
			t.Error(err)
		}
		n.checkThere(t, gpu0, true, p)
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
			_, err := n.Make(t.Context(), p)
			wantError(t, err, "broken")
			n.hw.fault = nil
			n.prepare(t, p)
			n.checkThere(t, gpu0, true, p)
			n.unprepare(t, p)
			if err := n.Leave(t.Context()); err != nil {
				t.Error(err)
			}
			n.checkThere(t, gpu0, false)
		})
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
			if err := n.Leave(t.Context()); err != nil {
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
	if _, err := n.Make(t.Context(), p); err != nil {
		t.Error(err)
	}
	<-took
	_, err := n.Make(t.Context(), p)
	wantError(t, err, "driver isn't there")
	n.checkThere(t, gpu0, true, p)
}

func TestWhole(t *testing.T) {
	n := newNode(t, newHardware())
	n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Hour})
	a, b := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6)
	n.prepare(t, a)
	n.prepare(t, b)
	n.unprepare(t, a)
	n.checkThere(t, gpu0, true, a, b)
	wantError(t, n.Whole(t.Context(), gpu0), "claim default/claim-980fb007-1g.18gb-6", "use GPU "+string(gpu0)+" whole")
	n.unprepare(t, b)
	n.hold(t, gpu.Whole{GPU: gpu0})
	n.hw.outside(gpu0, func(g *simulated) { g.users[""] = 1 })
	wantError(t, n.Whole(t.Context(), gpu0), "in use by process 4243")
	n.hw.outside(gpu0, func(g *simulated) { g.users = map[gpu.UUID]int{} })
	for range 2 {
		if err := n.Whole(t.Context(), gpu0); err != nil {
			t.Error(err)
		}
		n.checkThere(t, gpu0, false)
	}
	if got := n.journal.GPUs(); len(got) > 0 {
		t.Errorf("records left: %v", got)
	}
	n.hw.fault = func(string, gpu.UUID) error { return nvml.ErrNotSupported }
	if err := n.Whole(t.Context(), gpu1); err != nil {
		t.Errorf("a GPU without MIG: %v", err)
	}
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

// modified is when the GPU's record was last written.
func modified(t testing.TB, n *node) time.Time {
	t.Helper()
	info, err := os.Stat(filepath.Join(n.dir, "gpus", string(gpu0)+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return info.ModTime()
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

func TestUnreadableRecord(t *testing.T) {
	n := newNode(t, newHardware())
	p, other := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6)
	first := n.prepare(t, p)
	n.journal.Close()
	path := filepath.Join(n.dir, "gpus", string(gpu0)+".json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data[:len(data)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	n = start(t, n.hw, n.dir, "boot-1", nil)
	wantError(t, n.Recover(t.Context()), path[:len(path)-5]+".corrupt", "-mig 0")
	if got := n.Conditions(); len(got[gpu0]) != 1 || got[gpu0][0].Type != gpu.StateUnreadable {
		t.Errorf("conditions: %v", got)
	}
	if again, err := n.Make(t.Context(), p); err != nil || again != first {
		t.Errorf("what is there can be used: got %v, %v", again, err)
	}
	n.hold(t, other)
	_, err = n.Make(t.Context(), other)
	wantError(t, err, "can't be read")
	wantError(t, n.Whole(t.Context(), gpu0), "can't be read")
	n.unprepare(t, p)
	n.checkThere(t, gpu0, true, p)
	n.hw.reboot() // or an administrator's hand
	n.prepare(t, other)
	n.checkThere(t, gpu0, true, other)
	if got := n.Conditions(); len(got) > 0 {
		t.Errorf("conditions after: %v", got)
	}
}

// TestUnreadableRecordOfOthersMode: where the mode can't be ours, as before
// Hopper, it needn't be switched off for the record to be settled.
func TestUnreadableRecordOfOthersMode(t *testing.T) {
	n := newNode(t, newHardware())
	n.hw.outside(gpu0, func(g *simulated) { g.mig.Enabled, g.mig.Pending, g.mig.Switchable = true, true, false })
	p, other := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6)
	n.prepare(t, p)
	n.journal.Close()
	if err := os.WriteFile(filepath.Join(n.dir, "gpus", string(gpu0)+".json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	n = start(t, n.hw, n.dir, "boot-1", nil)
	wantError(t, n.Recover(t.Context()), "can't be read")
	n.unprepare(t, p)
	n.hw.outside(gpu0, func(g *simulated) { g.mig.Instances = nil })
	n.prepare(t, other)
	n.checkThere(t, gpu0, true, other)
}

// TestUnreadableClaim damages a claim's file: its possible partitions stay, and
// are destroyed some time after the claim was unprepared.
func TestUnreadableClaim(t *testing.T) {
	p := part(gpu0, "1g.18gb", 0)
	for name, damage := range map[string]func([]byte) []byte{
		"cut off": func(data []byte) []byte { return data[:10] },
		"changed": func(data []byte) []byte { return []byte(strings.Replace(string(data), "default", "defaulT", 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, newHardware())
				n.prepare(t, p)
				n.journal.Close()
				path := filepath.Join(n.dir, uid(p)+".json")
				data, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, damage(data), 0o600); err != nil {
					t.Fatal(err)
				}
				n = n.restart(t, "boot-1")
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() { n.Run(ctx); close(done) }()
				time.Sleep(time.Hour)
				n.checkThere(t, gpu0, true, p)
				if looks := n.hw.count("look"); looks > 100 {
					t.Errorf("%d looks in an hour", looks)
				}
				if err := n.journal.Delete(uid(p)); err != nil { // unprepared
					t.Fatal(err)
				}
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				n.checkThere(t, gpu0, false)
				stop()
				<-done
			})
		})
	}
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
	_, err := n.Make(ctx, part(gpu0, "1g.18gb", 1))
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
	if err := n.Leave(t.Context()); err != nil {
		t.Error(err)
	}
	n.checkThere(t, gpu0, false)
	n.checkThere(t, gpu1, true, theirs)
}

// TestReadWhileMade has a partition made and destroyed while the node is read.
func TestReadWhileMade(t *testing.T) {
	n := newNode(t, newHardware())
	p := part(gpu0, "1g.18gb", 0)
	n.prepare(t, part(gpu0, "1g.18gb", 1))
	n.unprepare(t, part(gpu0, "1g.18gb", 1)) // the mode lingers
	got, err := n.Read(nil, func() (gpu.Node, error) {
		n.prepare(t, p)
		mig := n.hw.now(gpu0)
		n.unprepare(t, p)
		return gpu.Node{GPUs: []gpu.GPU{{UUID: gpu0, MIG: &mig}}}, nil
	})
	want := gpu.Node{GPUs: []gpu.GPU{{UUID: gpu0, MIG: &gpu.MIG{Switchable: true, Profiles: profiles()}}}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("read, %v (-want +got):\n%s", err, diff)
	}
}

// TestFactsStayWhileTheModeIsOurs checks that a GPU's facts are reported as before
// while MIG mode is on for a claim.
func TestFactsStayWhileTheModeIsOurs(t *testing.T) {
	n := newNode(t, newHardware())
	off := gpu.MIG{Switchable: true, Profiles: profiles()}
	before := gpu.GPU{UUID: gpu0, Index: 1, Minor: 1, MemoryReservedBytes: 1 << 20, Fabric: &gpu.Fabric{CliqueID: 1}, MIG: &off}
	n.prepare(t, part(gpu0, "1g.18gb", 1))
	foreign := n.hw.foreign(part(gpu0, "1g.18gb", 2), true)
	mig := n.hw.now(gpu0)
	lost := gpu.Condition{Type: gpu.Lost}
	now := gpu.GPU{UUID: gpu0, Index: 2, Minor: 9, MemoryReservedBytes: 2 << 20, MIG: &mig, Conditions: []gpu.Condition{lost}}
	read := func() (gpu.Node, error) { return gpu.Node{GPUs: []gpu.GPU{now}}, nil }
	got, err := n.Read([]gpu.GPU{before}, read)
	want := before
	want.MIG = &gpu.MIG{Switchable: true, Profiles: profiles(), Instances: []gpu.Instance{foreign}}
	want.Conditions = []gpu.Condition{lost}
	if diff := cmp.Diff(gpu.Node{GPUs: []gpu.GPU{want}}, got); diff != "" || err != nil {
		t.Errorf("read, %v (-want +got):\n%s", err, diff)
	}
}

// TestModeSwitchedIsTold checks that ModeSwitched is called before a partition is
// created, and that none is created as long as ModeSwitched fails.
func TestModeSwitchedIsTold(t *testing.T) {
	n := newNode(t, newHardware())
	var told []string
	var fails error
	n.ModeSwitched = func(uuid gpu.UUID) error {
		told = append(told, fmt.Sprintf("%s enabled=%t instances=%d", uuid, n.hw.now(uuid).Enabled, len(n.hw.now(uuid).Instances)))
		return fails
	}
	p := part(gpu0, "1g.18gb", 0)
	n.prepare(t, p)
	n.unprepare(t, p)
	if err := n.Whole(t.Context(), gpu0); err != nil {
		t.Fatal(err)
	}
	want := []string{string(gpu0) + " enabled=true instances=0", string(gpu0) + " enabled=false instances=0"}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("told (-want +got):\n%s", diff)
	}
	fails = errors.New("no answer")
	n.hold(t, p)
	for range 2 {
		if _, err := n.Make(t.Context(), p); !errors.Is(err, fails) {
			t.Errorf("make: %v, want %v", err, fails)
		}
		if _, err := n.Find(t.Context(), p); !errors.Is(err, fails) {
			t.Errorf("find: %v, want %v", err, fails)
		}
		n.checkThere(t, gpu0, true)
	}
	fails = nil
	if _, err := n.Make(t.Context(), p); err != nil {
		t.Errorf("make, when it can be read: %v", err)
	}
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

// TestReadWhileTheModeIsSwitched: a GPU may not answer then, so it is read again;
// but not forever.
func TestReadWhileTheModeIsSwitched(t *testing.T) {
	for name, ends := range map[string]bool{"the switch ends": true, "the switch hangs": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, newHardware())
				begun, goOn := make(chan struct{}), make(chan struct{})
				n.hw.fault = func(call string, _ gpu.UUID) error {
					if call == "mode" {
						close(begun)
						<-goOn
					}
					return nil
				}
				var claim sync.WaitGroup
				claim.Go(func() { n.prepare(t, part(gpu0, "1g.18gb", 0)) })
				<-begun
				var answers []bool
				got, err := n.Read(nil, func() (gpu.Node, error) {
					answers = append(answers, n.hw.now(gpu0).Enabled)
					if len(answers) == 2 && ends {
						close(goOn)
						claim.Wait()
					}
					return gpu.Node{Name: fmt.Sprint(answers)}, nil
				})
				want := "[false false true]"
				if !ends {
					want = fmt.Sprint(make([]bool, 20))
					close(goOn)
				}
				claim.Wait()
				if got.Name != want || err != nil {
					t.Errorf("read %s, %v, want %s", got.Name, err, want)
				}
			})
		})
	}
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
			if err := n.Leave(t.Context()); err != nil {
				t.Error(err)
			}
			n.checkThere(t, gpu0, true, p)
			if got := n.journal.GPUs(); len(got) > 0 {
				t.Errorf("records: %v", got)
			}
		})
	}
}

func checkRead(t testing.TB, n *node, foreign gpu.Instance) {
	got, err := n.Read(nil, func() (gpu.Node, error) {
		var facts gpu.Node
		for _, uuid := range []gpu.UUID{gpu0, gpu1} {
			mig := n.hw.now(uuid)
			facts.GPUs = append(facts.GPUs, gpu.GPU{UUID: uuid, MIG: &mig})
		}
		return facts, nil
	})
	want := gpu.Node{GPUs: []gpu.GPU{
		{UUID: gpu0, MIG: &gpu.MIG{Switchable: true, Profiles: profiles()}},
		{UUID: gpu1, MIG: &gpu.MIG{Enabled: true, Pending: true, Switchable: true, Profiles: profiles(), Instances: []gpu.Instance{foreign}}},
	}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("read, %v (-want +got):\n%s", err, diff)
	}
}
