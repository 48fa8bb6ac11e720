package partition_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// death ends a plugin at a step, as kill -9 does: from then on whatever
// goroutine comes to a step ends.
type death struct {
	mu    sync.Mutex
	steps []string
	at    int // 0: never
}

func (d *death) step(name string) {
	d.mu.Lock()
	d.steps = append(d.steps, name)
	dead := d.at > 0 && len(d.steps) >= d.at
	d.mu.Unlock()
	if dead {
		runtime.Goexit()
	}
}

// scenario is an operation and its preconditions.
type scenario struct {
	before, do func(*testing.T, *node)
	// steps is the least number of steps it must have, so that a test that
	// does nothing is noticed.
	steps int
}

func scenarios() map[string]scenario {
	a, b, large := part(gpu0, "1g.18gb", 0), part(gpu0, "1g.18gb", 6), part(gpu0, "3g.71gb", 0)
	nothing := func(*testing.T, *node) {}
	make := func(p gpu.Partition) func(*testing.T, *node) {
		return func(t *testing.T, n *node) { n.hold(t, p); _, _ = n.Ensure(t.Context(), p) }
	}
	release := func(p gpu.Partition) func(*testing.T, *node) {
		return func(t *testing.T, n *node) {
			_ = n.Release(t.Context(), p)
			_ = n.journal.Delete(uid(p))
		}
	}
	prepared := func(all ...gpu.Partition) func(*testing.T, *node) {
		return func(t *testing.T, n *node) {
			for _, p := range all {
				n.prepare(t, p)
			}
		}
	}
	warm := func(all ...gpu.Partition) func(*testing.T, *node) {
		return func(t *testing.T, n *node) {
			n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Hour})
			prepared(all...)(t, n)
			for _, p := range all {
				n.unprepare(t, p)
			}
		}
	}
	return map[string]scenario{
		"make the first":       {nothing, make(a), 12},
		"make another":         {prepared(b), make(a), 10},
		"make in the place of": {warm(b, a), make(large), 12},
		"make, short of engines": {warm(part(gpu0, "1g.18gb+me", 5)), func(t *testing.T, n *node) {
			make(part(gpu0, "1g.18gb+me", 4))(t, n)
		}, 12},
		"make, compute instance fails": {nothing, func(t *testing.T, n *node) {
			n.hw.fault = func(call string, _ gpu.UUID) error {
				if call == "createCompute" {
					return errors.New("broken")
				}
				return nil
			}
			make(a)(t, n)
		}, 10},
		"make, mode fails": {nothing, func(t *testing.T, n *node) {
			n.hw.outside(gpu0, func(g *simulated) { g.users[""] = 1 })
			make(a)(t, n)
		}, 8},
		"release":          {prepared(a, b), release(a), 8},
		"release the last": {prepared(a), release(a), 8},
		"release, in use": {prepared(a), func(t *testing.T, n *node) {
			n.hw.outside(gpu0, func(g *simulated) { g.users[g.mig.Instances[0].UUID] = 1 })
			_ = n.Release(t.Context(), a)
		}, 0},
		"whole": {warm(a, b), func(t *testing.T, n *node) { _ = n.ClearMIG(t.Context(), gpu0) }, 8},
		"leave": {warm(a, b), func(t *testing.T, n *node) { _ = n.LeaveHost(t.Context()) }, 8},
		"recover": {func(t *testing.T, n *node) {
			warm(a, b)(t, n)
			n.prepare(t, part(gpu1, "1g.18gb", 3))
			n.hw.outside(gpu0, func(g *simulated) {
				g.mig.Instances[0].UUID, g.mig.Instances[0].ComputeInstanceID = "", gpu.NoComputeInstance
			})
		}, func(t *testing.T, n *node) {
			n.SetKeepWarm(nil)
			_ = n.Recover(t.Context())
		}, 8},
	}
}

// TestCrash stops each operation after each of its steps, inside the port's
// calls too, lets something happen, starts a new Manager, and asserts the
// invariants; then ends all claims and asserts that all is as it was.
func TestCrash(t *testing.T) {
	for name, s := range scenarios() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			whole := crash(t, s, 0)
			if len(whole.steps) < s.steps {
				t.Fatalf("steps: %q, want at least %d", whole.steps, s.steps)
			}
			for at := range len(whole.steps) + 1 {
				for what, event := range map[string]func(*testing.T, *node) string{
					"killed":   func(*testing.T, *node) string { return "boot-1" },
					"rebooted": func(_ *testing.T, n *node) string { n.hw.reboot(); return "boot-2" },
					"driver reloaded": func(_ *testing.T, n *node) string {
						n.hw.reboot()
						return "boot-1"
					},
				} {
					t.Run(fmt.Sprintf("%02d %s", at, what), func(t *testing.T) { checkCrash(t, s, at, event) })
				}
			}
		})
	}
}

// crashed is a node whose plugin is dead.
type crashed struct {
	*node
	steps  []string
	theirs gpu.Instance
}

// crash runs the scenario until the step. On the other GPU there is an
// instance of others.
func crash(t *testing.T, s scenario, at int) crashed {
	hw := newHardware()
	theirs := hw.foreign(part(gpu1, "1g.18gb", 6), true)
	d := &death{}
	n := start(t, hw, t.TempDir(), "boot-1", func(step string) { d.step(step) })
	hw.step = func(step string) { d.step(step) }
	s.before(t, n)
	d.steps, d.at = nil, at
	var wg sync.WaitGroup
	wg.Go(func() { s.do(t, n) })
	wg.Wait()
	hw.step, hw.fault = func(string) {}, nil
	for _, uuid := range []gpu.UUID{gpu0, gpu1} {
		hw.outside(uuid, func(g *simulated) { g.users = map[gpu.UUID]int{} })
	}
	return crashed{node: n, steps: d.steps, theirs: theirs}
}

func checkCrash(t *testing.T, s scenario, at int, event func(*testing.T, *node) string) {
	c := crash(t, s, at)
	boot := event(t, c.node)
	if boot == "boot-1" && len(c.hw.now(gpu1).Instances) == 0 { // theirs went with the driver
		c.theirs = c.hw.foreign(part(gpu1, "1g.18gb", 6), true)
	}
	if boot == "boot-2" {
		c.theirs = c.hw.foreign(part(gpu1, "1g.18gb", 6), true)
	}
	n := c.restart(t, boot)
	checkInvariants(t, n, c.theirs)
	if err := n.Recover(t.Context()); err != nil {
		t.Errorf("recover again: %v", err)
	}
	checkInvariants(t, n, c.theirs)
	held := heldPartitions(n)
	for _, p := range held { // the kubelet prepares again what it got no answer to
		n.prepare(t, p)
	}
	checkInvariants(t, n, c.theirs)
	for _, p := range held {
		if i, err := n.Find(t.Context(), p); err != nil || i.UUID == "" {
			t.Errorf("held %v: got %v, %v", p, i, err)
		}
		n.unprepare(t, p)
	}
	if err := n.LeaveHost(t.Context()); err != nil {
		t.Errorf("leave: %v", err)
	}
	n.checkThere(t, gpu0, false)
	n.checkThere(t, gpu1, true, part(gpu1, "1g.18gb", 6))
	if got := n.journal.GPUs(); len(got) > 0 {
		t.Errorf("records left: %v", got)
	}
	if got, _ := filepath.Glob(filepath.Join(n.dir, "gpus", "*")); len(got) > 0 {
		t.Errorf("files left: %v", got)
	}
}

func heldPartitions(n *node) []gpu.Partition {
	var held []gpu.Partition
	for _, r := range n.journal.Claims() {
		for _, g := range r.Holdings {
			held = append(held, g.Of().(gpu.Partition))
		}
	}
	return held
}

// checkInvariants: each instance is others', or in a record and complete and
// held by a claim; others' are as they were; the mode is on only where
// something is.
func checkInvariants(t *testing.T, n *node, theirs gpu.Instance) {
	t.Helper()
	held := heldPartitions(n)
	for _, uuid := range []gpu.UUID{gpu0, gpu1} {
		mig := n.hw.now(uuid)
		for _, i := range mig.Instances {
			if uuid == gpu1 && i == theirs {
				continue
			}
			if i.UUID == "" || !slices.Contains(held, gpu.Partition{GPU: uuid, Profile: i.Profile, Placement: i.Placement}) {
				t.Errorf("orphan on %s: %v", uuid, i)
			}
			if r, ok := n.journal.GPU(uuid); !ok || len(r.Partitions) == 0 {
				t.Errorf("no record of %v", i)
			}
		}
		if mig.Enabled && len(mig.Instances) == 0 {
			t.Errorf("MIG mode of %s is on for nothing", uuid)
		}
	}
	if !slices.Contains(n.hw.now(gpu1).Instances, theirs) {
		t.Errorf("others' instance is gone: %v", n.hw.now(gpu1))
	}
}

// TestRecordCannotBeWritten takes the directory away before each write.
func TestRecordCannotBeWritten(t *testing.T) {
	p := part(gpu0, "1g.18gb", 0)
	for name, breaks := range map[string]string{"intent": "look", "result": "create", "release": "destroy"} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, newHardware())
			n.prepare(t, part(gpu0, "1g.18gb", 6))
			if name == "release" {
				n.prepare(t, p)
			}
			n.hold(t, p)
			dir := filepath.Join(n.dir, "gpus")
			n.hw.fault = func(call string, _ gpu.UUID) error {
				if call == breaks {
					return os.Rename(dir, dir+".away")
				}
				return nil
			}
			var err error
			if name == "release" {
				err = n.Release(t.Context(), p)
			} else {
				_, err = n.Ensure(t.Context(), p)
			}
			wantError(t, err, "write the journal record")
			n.hw.fault = nil
			if err := errors.Join(os.RemoveAll(dir), os.Rename(dir+".away", dir)); err != nil {
				t.Fatal(err)
			}
			n.prepare(t, p)
			n.unprepare(t, p)
			n = n.restart(t, "boot-1")
			n.checkThere(t, gpu0, true, part(gpu0, "1g.18gb", 6))
		})
	}
}

// TestRecoverGoesOn when one GPU is lost.
func TestRecoverGoesOn(t *testing.T) {
	n := newNode(t, newHardware())
	a, b := part(gpu0, "1g.18gb", 0), part(gpu1, "1g.18gb", 0)
	n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Hour, gpu1: time.Hour})
	for _, p := range []gpu.Partition{a, b} {
		n.prepare(t, p)
		n.unprepare(t, p)
	}
	n.SetKeepWarm(nil)
	n.hw.outside(gpu0, func(g *simulated) { g.lost = true })
	err := n.Recover(t.Context())
	wantError(t, err, string(gpu0))
	if !errors.Is(err, nvml.ErrLost) {
		t.Errorf("got %v, want ErrLost", err)
	}
	n.checkThere(t, gpu1, false)
	n.hw.reboot()
	n = n.restart(t, "boot-2")
	if diff := cmp.Diff(0, len(n.journal.GPUs())); diff != "" {
		t.Errorf("records after a reboot: %v", n.journal.GPUs())
	}
}

// TestStopsInBetween: operations in progress when the context ends are
// finished, and no others begin.
func TestStopsInBetween(t *testing.T) {
	n := newNode(t, newHardware())
	n.SetKeepWarm(map[gpu.UUID]time.Duration{gpu0: time.Hour})
	for s := range 3 {
		n.prepare(t, part(gpu0, "1g.18gb", s))
		n.unprepare(t, part(gpu0, "1g.18gb", s))
	}
	ctx, cancel := context.WithCancel(t.Context())
	n.hw.fault = func(call string, _ gpu.UUID) error {
		if call == "destroy" {
			cancel()
		}
		return nil
	}
	if err := n.LeaveHost(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was canceled", err)
	}
	n.checkThere(t, gpu0, true, part(gpu0, "1g.18gb", 1), part(gpu0, "1g.18gb", 2))
	if r, _ := n.journal.GPU(gpu0); len(r.Partitions) != 2 {
		t.Errorf("record: %v", r)
	}
	_, err := n.Ensure(ctx, part(gpu0, "1g.18gb", 6))
	if err == nil {
		t.Error("made after the end of the context")
	}
}

// TestLeaveStops checks that Leave stops when its context ends, after it has
// finished the operation in progress.
func TestLeaveStops(t *testing.T) {
	n := newNode(t, newHardware())
	n.prepare(t, part(gpu0, "1g.18gb", 0))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	unblock := make(chan struct{})
	busy := make(chan struct{})
	n.hw.fault = func(string, gpu.UUID) error { close(busy); <-unblock; return nil }
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = n.Find(t.Context(), part(gpu0, "1g.18gb", 0)) })
	<-busy
	if err := n.LeaveHost(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was canceled", err)
	}
	close(unblock)
	wg.Wait()
}
