package sharing_test

import (
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
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
	before []holding.Record
	do     func(*testing.T, *node)
	// steps is the least number of steps it must have, so that a test that
	// does nothing is noticed.
	steps int
}

func scenarios() map[string]scenario {
	prepare := func(r holding.Record) func(*testing.T, *node) {
		return func(t *testing.T, n *node) { n.prepare(t, r) }
	}
	unprepare := func(uid string) func(*testing.T, *node) {
		return func(t *testing.T, n *node) { n.unprepare(t, uid) }
	}
	a, b := claim("a", share(gpu0, 0)), claim("b", share(gpu0, 1))
	two := claim("two", wholeMPS(gpu0, 10), wholeMPS(gpu1, 20))
	return map[string]scenario{
		"first share":           {do: prepare(a), steps: 12},
		"another share":         {before: []holding.Record{b}, do: prepare(a), steps: 6},
		"a larger share":        {before: []holding.Record{claim("b", some(gpu0, 1, 1))}, do: prepare(claim("a", some(gpu0, 2, 2))), steps: 6},
		"share of a partition":  {do: prepare(claim("a", ofPartition(gpu0, 0))), steps: 6},
		"MPS over two GPUs":     {do: prepare(two), steps: 18},
		"time slice":            {do: prepare(claim("a", wholeSlice(gpu0, "Long"))), steps: 10},
		"replica":               {before: []holding.Record{claim("b", replica(gpu0, 1))}, do: prepare(claim("a", replica(gpu0, 0), replica(gpu1, 0))), steps: 10},
		"last share leaves":     {before: []holding.Record{a}, do: unprepare("a"), steps: 8},
		"a share leaves":        {before: []holding.Record{a, b}, do: unprepare("a"), steps: 2},
		"the largest leaves":    {before: []holding.Record{claim("a", some(gpu0, 2, 2)), claim("b", some(gpu0, 1, 1))}, do: unprepare("a"), steps: 4},
		"a partition's leaves":  {before: []holding.Record{claim("a", ofPartition(gpu0, 0))}, do: unprepare("a"), steps: 4},
		"MPS over two GPUs off": {before: []holding.Record{two}, do: unprepare("two"), steps: 10},
		"time slice off":        {before: []holding.Record{claim("a", wholeSlice(gpu0, "Long"))}, do: unprepare("a"), steps: 6},
		"a daemon dies and is back": {
			before: []holding.Record{a},
			do: func(t *testing.T, n *node) {
				n.machine.do(func() {
					s := n.machine.daemons["gpu-980fb007"]
					s.Phase, s.PID = mps.Failed, 0
					n.machine.daemons["gpu-980fb007"] = s
				})
				if err := n.Recover(t.Context()); err != nil {
					t.Error(err)
				}
				n.prepare(t, b)
			},
			steps: 9,
		},
		"replica off": {before: []holding.Record{claim("a", replica(gpu0, 0))}, do: unprepare("a"), steps: 6},
	}
}

// TestCrash stops each operation after each of its steps, inside the ports'
// calls too, lets something happen, starts a new Manager, and asserts the
// invariants; then ends all claims and asserts that all is as it was.
func TestCrash(t *testing.T) {
	for name, s := range scenarios() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, steps := crash(t, s, 0)
			if len(steps) < s.steps {
				t.Fatalf("steps: %q, want at least %d", steps, s.steps)
			}
			for at := range len(steps) + 1 {
				for what, event := range map[string]func(*machine) string{
					"killed":   func(*machine) string { return "boot-1" },
					"rebooted": func(m *machine) string { m.reboot(); return "boot-2" },
					"driver reloaded": func(m *machine) string {
						m.reboot() // which no daemon survives
						return "boot-1"
					},
					"daemons and all that is left of them wiped": func(m *machine) string {
						m.do(func() { clear(m.daemons) })
						return "boot-1"
					},
				} {
					t.Run(fmt.Sprintf("%02d %s", at, what), func(t *testing.T) { checkCrash(t, s, at, event) })
				}
			}
		})
	}
}

var policy = map[gpu.UUID]string{gpu0: "Short", gpu1: "Medium"}

// crash runs the scenario until the step.
func crash(t *testing.T, s scenario, at int) (*node, []string) {
	m, d := newMachine(), &death{}
	n := start(t, m, t.TempDir(), "boot-1", d.step)
	n.SetTimeSlices(policy)
	m.set(func() { m.step = d.step })
	for _, r := range s.before {
		n.prepare(t, r)
	}
	d.steps, d.at = nil, at
	var wg sync.WaitGroup
	wg.Go(func() { s.do(t, n) })
	wg.Wait()
	m.set(func() { m.step = func(string) {} })
	return n, d.steps
}

func checkCrash(t *testing.T, s scenario, at int, event func(*machine) string) {
	n, _ := crash(t, s, at)
	n = n.restart(t, event(n.machine))
	n.SetTimeSlices(policy)
	checkInvariants(t, n)
	n.recover(t)
	checkInvariants(t, n)
	for _, r := range n.journal.Claims().Records() { // the kubelet prepares again what it got no answer to
		for name, c := range n.prepare(t, r) {
			if c.PipeDir == "" {
				t.Errorf("no pipe directory for %s", name)
			}
		}
	}
	checkInvariants(t, n)
	for _, r := range n.journal.Claims() {
		n.unprepare(t, r.ClaimUID)
		checkInvariants(t, n)
	}
	if err := n.leaveHost(t); err != nil {
		t.Error(err)
	}
	n.check(t, is{})
	if got, _ := filepath.Glob(filepath.Join(n.dir, "settings", "*")); len(got) > 0 {
		t.Errorf("files left: %v", got)
	}
}

// checkInvariants checks that exactly the daemons that claims of this boot need run, and
// that each changed setting of a GPU is needed and its original value recorded.
func checkInvariants(t *testing.T, n *node) {
	t.Helper()
	daemons, exclusive, sliced := map[string]bool{}, map[gpu.UUID]bool{}, map[gpu.UUID]bool{}
	for _, r := range n.journal.Claims() {
		for _, g := range r.Holdings {
			switch {
			case r.BootID != n.boot:
			case g.Share == nil && g.MPS != nil:
				daemons["claim-"+r.ClaimUID], exclusive[g.GPU] = true, true
			case g.Partition != (holding.Partition{}):
				daemons[fmt.Sprintf("%s-mig-1g18gb-%d", name(g.GPU), g.Partition.Start)] = true
			case g.Share != nil:
				daemons[name(g.GPU)], exclusive[g.GPU] = true, true
			default:
				sliced[g.GPU] = true
			}
		}
	}
	m := n.machine
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range daemons {
		if s, ok := m.daemons[name]; !ok || s.Phase != mps.Running {
			t.Errorf("daemon %s doesn't run", name)
		}
	}
	for name := range m.daemons {
		if !daemons[name] {
			t.Errorf("orphan: daemon %s", name)
		}
	}
	remembered := func(uuid gpu.UUID) holding.Settings {
		all := n.journal.AllSettings()
		if i := slices.IndexFunc(all, func(s holding.Settings) bool { return s.GPU == uuid && s.BootID == n.boot }); i >= 0 {
			return all[i]
		}
		return holding.Settings{}
	}
	for _, uuid := range []gpu.UUID{gpu0, gpu1} {
		s := remembered(uuid)
		if is := m.modes[uuid] == nvml.ComputeExclusiveProcess; is != exclusive[uuid] || is != (s.ComputeModeBefore == "default") {
			t.Errorf("GPU %s: mode %s, remembered %+v", uuid, m.modes[uuid], s)
		}
		if is := m.intervals[uuid] != "Default"; is && s.TimeSliceBefore != "Default" || is && !sliced[uuid] {
			t.Errorf("GPU %s: interval %s, remembered %+v", uuid, m.intervals[uuid], s)
		}
	}
	for _, f := range m.faults {
		t.Error(f)
	}
}
