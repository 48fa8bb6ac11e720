package sharing_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// failing is an operation that fails each time.
type failing struct {
	// begin brings the node to where the operation is needed.
	begin func(t *testing.T, n *node)
	// call is the beginning of the failing call.
	call string
	err  error
	// late, which may be nil, is called after Run has started.
	late func(t *testing.T, n *node)
}

var errDevice = errors.New("process 4711 doesn't end though it was killed")

func failures() map[string]failing {
	share0 := func(t *testing.T, n *node) { n.prepare(t, claim("a", share(gpu0, 0))) }
	return map[string]failing{
		"stop": {call: "stop ", err: errDevice, begin: func(t *testing.T, n *node) {
			share0(t, n)
			if err := n.journal.Delete("a"); err != nil { // its unprepare began the stop
				t.Fatal(err)
			}
		}},
		"stop of a daemon whose GPU isn't known": {call: "stop ", err: errDevice, begin: func(_ *testing.T, n *node) {
			n.machine.do(func() {
				n.machine.daemons["claim-x"] = mps.State{Daemon: mps.Daemon{Name: "claim-x"}, Phase: mps.Failed}
			})
		}},
		// Somebody has emptied the supervisor's run directory.
		"start": {call: "ensure ", err: errDevice, begin: func(t *testing.T, n *node) {
			share0(t, n)
			n.machine.do(func() { clear(n.machine.daemons) })
		}},
		"change of limits": {call: "ensure ", err: errDevice, begin: func(t *testing.T, n *node) {
			n.prepare(t, claim("a", some(gpu0, 2, 2)))
			n.prepare(t, claim("b", some(gpu0, 1, 1)))
		}, late: func(t *testing.T, n *node) { n.unprepare(t, "a") }},
		"compute mode that can't be set": {call: "set mode ", err: nvml.ErrNotResponding, begin: func(t *testing.T, n *node) {
			share0(t, n)
		}, late: func(_ *testing.T, n *node) { n.machine.do(func() { n.machine.die("gpu-980fb007") }) }},
		"compute mode that can't be read": {call: "mode ", err: nvml.ErrNotResponding, begin: func(t *testing.T, n *node) {
			share0(t, n)
		}, late: func(_ *testing.T, n *node) { n.machine.do(func() { n.machine.die("gpu-980fb007") }) }},
		"time slice": {call: "--set", err: errDevice, begin: func(t *testing.T, n *node) {
			n.prepare(t, claim("a", replica(gpu0, 0)))
		}, late: func(_ *testing.T, n *node) { n.SetTimeSlices(map[gpu.UUID]string{gpu0: "Long"}) }},
		"watch": {call: "watch", err: mps.ErrUnavailable, begin: share0},
	}
}

// TestFailuresAreRetriedSeldom: an operation that fails at once each time, and whose
// failure the supervisor reports as a change, is attempted and logged a few times a minute,
// less often later, and soon after its reason has gone.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	for name, f := range failures() {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				n := newNode(t, m)
				f.begin(t, n)
				fails := true
				m.mu.Lock()
				m.fault = func(call string) error {
					if !fails || !strings.HasPrefix(call, f.call) {
						return nil
					}
					m.do(func() {})              // the supervisor reports the beginning of an attempt
					time.Sleep(time.Millisecond) // it isn't one with the next
					m.do(func() {})              // and its failure
					return f.err
				}
				m.mu.Unlock()
				logged, end := n.runLogged(t)
				if f.late != nil {
					synctest.Wait()
					f.late(t, n)
				}
				before := m.count(f.call)
				for _, most := range []int{12, 3, 3} {
					time.Sleep(time.Minute)
					synctest.Wait()
					attempts, lines := m.count(f.call)-before, logged()
					if attempts > most || lines > most {
						t.Errorf("%d attempts and %d log lines in a minute, want at most %d", attempts, lines, most)
					}
					before += attempts
				}
				if before == 0 {
					t.Error("it was never attempted")
				}
				m.do(func() { fails = false })
				time.Sleep(2 * time.Minute)
				before = m.count(f.call)
				time.Sleep(30 * time.Second)
				if again := m.count(f.call) - before; again > 1 {
					t.Errorf("%d attempts after one has succeeded", again)
				}
				end()
			})
		})
	}
}

// runLogged runs Run until end is called. logged returns how many lines were logged since
// it was called last.
func (n *node) runLogged(t *testing.T) (logged func() int, end func()) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	buffer := logger.GetSink().(ktesting.Underlier).GetBuffer()
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	var wg sync.WaitGroup
	n.unwatch()
	wg.Go(func() { n.runChecked(ctx) })
	seen := 0
	logged = func() int {
		lines := len(buffer.Data()) - seen
		seen += lines
		return lines
	}
	return logged, func() { cancel(); wg.Wait(); n.watch(t) }
}

// TestSupervisorEndsAfterEachReport: a supervisor that ends as soon as it has answered, and
// is started again at once, is called and logged as seldom as one that doesn't start.
func TestSupervisorEndsAfterEachReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		m.do(func() { clear(m.daemons) })
		m.mu.Lock()
		m.fault = func(call string) error {
			if strings.HasPrefix(call, "ensure ") {
				return mps.ErrUnavailable
			}
			return nil
		}
		m.ends = true
		m.mu.Unlock()
		logged, end := n.runLogged(t)
		for _, most := range []int{12, 5} {
			watches, starts := m.count("watch"), m.count("ensure ")
			time.Sleep(time.Minute)
			synctest.Wait()
			watches, starts = m.count("watch")-watches, m.count("ensure ")-starts
			if lines := logged(); watches > most || starts > most || lines > most {
				t.Errorf("%d calls of Watch, %d starts and %d log lines in a minute, want at most %d", watches, starts, lines, most)
			}
		}
		end()
	})
}

// TestSupervisorIsBack: operations that failed because the supervisor was away are done as soon
// as it answers again.
func TestSupervisorIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		end := n.run(t)
		synctest.Wait()
		m.do(func() {
			m.away = true
			clear(m.daemons)
		})
		time.Sleep(5 * time.Minute)
		m.do(func() { m.away = false })
		time.Sleep(31 * time.Second) // the longest pause between two looks for it
		synctest.Wait()
		n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: n.journal.AllSettings()})
		end()
	})
}

// TestClosedInSpiteOfFailures: a GPU whose daemon dies is closed at once, also while the
// next attempt to change the daemon is minutes away.
func TestClosedInSpiteOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		n.prepare(t, claim("a", some(gpu0, 2, 2)))
		n.prepare(t, claim("b", some(gpu0, 1, 1)))
		m.mu.Lock()
		m.fault = func(call string) error {
			if strings.HasPrefix(call, "ensure ") {
				return errDevice
			}
			return nil
		}
		m.mu.Unlock()
		n.unprepare(t, "a")
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		m.do(func() { m.die("gpu-980fb007") })
		synctest.Wait()
		m.mu.Lock()
		if got := m.modes[gpu0]; got != nvml.ComputeProhibited {
			t.Errorf("the GPU whose daemon has died is in mode %s", got)
		}
		m.mu.Unlock()
		end()
	})
}
