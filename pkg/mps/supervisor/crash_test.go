package supervisor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/mps"
)

// scenario is something a supervisor does and may be killed in.
type scenario struct {
	// before is done by a supervisor that isn't killed; the next one is.
	before func(*node)
	// act has it come to its steps; it fails when the supervisor is killed.
	act func(*node)
	// want is the daemon that must run after the crash.
	want mps.Daemon
	// keeps: the daemon that ran before is the one that runs after.
	keeps bool
}

func scenarios() map[string]scenario {
	changed := one("a")
	changed.ThreadPercentage, changed.MemoryMiB = 50, []int64{6144}
	moved := one("a")
	moved.Devices[0] = "GPU-2"
	nothing := func(*node) {}
	ensure := func(d mps.Daemon) func(*node) {
		return func(n *node) { _, _ = n.Ensure(n.t.Context(), d) }
	}
	has := func(d mps.Daemon) func(*node) { return func(n *node) { n.ensure(d) } }
	return map[string]scenario{
		"first start":   {before: nothing, act: ensure(one("a")), want: one("a")},
		"changed":       {before: has(one("a")), act: ensure(changed), want: changed, keeps: true},
		"other devices": {before: has(one("a")), act: ensure(moved), want: moved},
		"stop":          {before: has(one("a")), act: func(n *node) { _, _ = n.Stop(n.t.Context(), "a") }, want: one("a")},
		"adoption": {
			before: has(one("a")),
			act: func(n *node) {
				ctx, cancel := context.WithCancel(n.t.Context())
				defer cancel()
				_ = n.Watch(ctx, func(r mps.Report) { // or until it is killed
					if len(r.Daemons) == 1 && r.Daemons[0].ServerPID != 0 {
						cancel()
					}
				})
			},
			want: one("a"), keeps: true,
		},
		"death": {
			before: has(one("a")),
			act: func(n *node) {
				if pids := n.controls("a"); len(pids) > 0 { // else it was killed in the adoption
					_ = unix.Kill(pids[0], unix.SIGKILL)
				}
				_ = n.Watch(n.t.Context(), func(mps.Report) {}) // until it is killed
			},
			want: one("a"),
		},
	}
}

// The supervisor is killed after each of its steps. Whatever it was doing, the
// next one has no daemon twice and none that it doesn't know, does what it is
// asked, and leaves nothing behind.
func TestKilledAtEveryStep(t *testing.T) {
	for name, sc := range scenarios() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, step := range stepsOf(t, name, sc) {
				t.Run(step, func(t *testing.T) { killedAt(t, sc, step) })
			}
		})
	}
}

// stepsOf runs the scenario without a crash, and returns the steps, numbered.
func stepsOf(t *testing.T, name string, sc scenario) []string {
	if name == "death" { // ends only by the crash
		var steps []string
		for _, step := range []string{"start.made", "start.recorded", "start.cleaned", "start.launched", "start.known", "start.limited"} {
			steps = append(steps, step+"#1")
		}
		return steps
	}
	n := newNode(t)
	n.start("")
	sc.before(n)
	n.kill()
	n.start("")
	sc.act(n)
	n.kill()
	times := map[string]int{}
	var steps []string
	for step := range n.steps {
		times[step]++
		steps = append(steps, fmt.Sprintf("%s#%d", step, times[step]))
	}
	if len(steps) < 2 {
		t.Fatalf("steps: %q", steps)
	}
	return steps
}

func killedAt(t *testing.T, sc scenario, step string) {
	n := newNode(t)
	n.start("")
	sc.before(n)
	n.kill()
	ran := n.controls("a")
	n.start(step)
	sc.act(n)
	if strings.HasPrefix(step, "adopt.limited#") {
		n.kill() // a request that is faster makes the step unnecessary
	} else {
		n.crashed()
	}

	n.start("")
	known := n.until(func(states []mps.State) bool {
		return !slices.ContainsFunc(states, func(s mps.State) bool { return s.Phase != mps.Running })
	})
	var pids []int
	for _, state := range known {
		pids = append(pids, state.PID)
	}
	if running := n.controls("a"); !slices.Equal(running, pids) {
		t.Errorf("daemons %v run, known are %v", running, pids)
	}
	state := n.ensure(sc.want)
	if running := n.controls("a"); !slices.Equal(running, []int{state.PID}) {
		t.Errorf("daemons %v run, known is %d", running, state.PID)
	}
	if sc.keeps && !slices.Equal(ran, []int{state.PID}) {
		t.Errorf("the daemon %v was replaced by %d", ran, state.PID)
	}
	limits := fmt.Sprintf("%d.0\n%dG\n", sc.want.ThreadPercentage, sc.want.MemoryMiB[0]/1024)
	if got := n.ask("a", "get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0"); got != limits {
		t.Errorf("limits %q, want %q", got, limits)
	}
	if _, err := n.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	n.gone("a")
}
