package sharing_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// TestFoundSettings: settings of others from before.
func TestFoundSettings(t *testing.T) {
	for name, tc := range map[string]struct {
		mode     nvml.ComputeMode
		interval string
		claim    holding.Record
		during   is
	}{
		"exclusive already": {
			mode: nvml.ComputeExclusiveProcess, interval: "Default", claim: claim("a", wholeMPS(gpu0, 0)),
			during: is{Modes: exclusive0},
		},
		"long, and the claim wants short": {
			mode: nvml.ComputeDefault, interval: "Long", claim: claim("a", wholeSlice(gpu0, "Short")),
			during: is{Intervals: map[gpu.UUID]string{gpu0: "Short"}, Settings: []holding.Settings{changedSlice(gpu0, "Long")}},
		},
		"long already": {
			mode: nvml.ComputeDefault, interval: "Long", claim: claim("a", wholeSlice(gpu0, "Long")),
			during: is{Intervals: map[gpu.UUID]string{gpu0: "Long"}},
		},
		"long, and the claim wants the default": {
			mode: nvml.ComputeDefault, interval: "Long", claim: claim("a", wholeSlice(gpu0, "Default")),
			during: is{Intervals: map[gpu.UUID]string{gpu0: "Long"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine()
			m.modes[gpu0], m.intervals[gpu0] = tc.mode, tc.interval
			n := newNode(t, m)
			n.prepare(t, tc.claim)
			m.do(func() { clear(m.daemons) })
			n.check(t, tc.during)
			n.unprepare(t, "a")
			if m.modes[gpu0] != tc.mode || m.intervals[gpu0] != tc.interval || len(n.journal.AllSettings()) > 0 {
				t.Errorf("afterwards: %s, %s, %v", m.modes[gpu0], m.intervals[gpu0], n.journal.AllSettings())
			}
		})
	}
}

func TestProhibited(t *testing.T) {
	m := newMachine()
	m.modes[gpu0] = nvml.ComputeProhibited
	n := newNode(t, m)
	_, err := n.Join(t.Context(), n.hold(t, claim("a", share(gpu0, 0))), nil)
	wantError(t, err, "prohibited", "nvidia-smi -i "+string(gpu0), string(gpu0))
	n.check(t, is{Modes: map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited}})
	n.unprepare(t, "a")
	n.check(t, is{Modes: map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited}})
}

// TestProhibitedWhileAway checks that shares of a GPU that others prohibited are refused while the
// daemon is away, too: otherwise the plugin would take the mode for its own.
func TestProhibitedWhileAway(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.end()
	m.do(func() {
		clear(m.daemons)
		m.modes[gpu0] = nvml.ComputeProhibited
	})
	n = start(t, m, n.dir, "boot-1", nil)
	wantError(t, n.Recover(t.Context()), "prohibited")
	_, err := n.Join(t.Context(), n.hold(t, claim("b", share(gpu0, 1))), nil)
	wantError(t, err, "prohibited", "nvidia-smi -i "+string(gpu0), string(gpu0))
	n.unprepare(t, "b")
	n.unprepare(t, "a")
	n.check(t, is{Modes: map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited}})
}

// TestChangedMeanwhile: a mode that another program sets while a daemon runs
// stays.
func TestChangedMeanwhile(t *testing.T) {
	n := newNode(t, newMachine())
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.machine.do(func() { n.machine.modes[gpu0] = nvml.ComputeProhibited })
	n.unprepare(t, "a")
	n.check(t, is{Modes: map[gpu.UUID]nvml.ComputeMode{gpu0: nvml.ComputeProhibited}})
}

// TestModeUnchanged: --mps-compute-mode=unchanged, after a start with another value.
func TestModeUnchanged(t *testing.T) {
	m := newMachine()
	n := newNode(t, m)
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.end()
	m.exclusive = false
	m.faults = nil
	n = startWith(t, m, n.dir, "boot-1", sharing.Config{})
	n.recover(t)
	m.faults = nil // the mode is restored while the daemon runs, as this option asks
	n.check(t, is{Daemons: []mps.Daemon{{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}}}})
	n.unprepare(t, "a")
	n.prepare(t, claim("b", share(gpu0, 0)))
	if m.modes[gpu0] != nvml.ComputeDefault {
		t.Errorf("mode: %s", m.modes[gpu0])
	}
	n.unprepare(t, "b")
	n.check(t, is{})
}

func TestWithoutComputeModes(t *testing.T) {
	m := newMachine()
	m.exclusive = false // can't be
	m.set(func() {
		m.fault = func(call string) error {
			if strings.HasPrefix(call, "mode") {
				return nvml.ErrNotSupported
			}
			return nil
		}
	})
	n := startWith(t, m, t.TempDir(), "boot-1", sharing.Config{ExclusiveProcess: true})
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.unprepare(t, "a")
	n.check(t, is{})
}

// TestPutBackLater: a claim may go although the GPU doesn't answer; a new claim
// waits until the settings are restored, and Run restores them without one.
func TestPutBackLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		m.set(func() {
			m.fault = func(call string) error {
				if strings.HasPrefix(call, "mode") {
					return nvml.ErrLost
				}
				return nil
			}
		})
		n.unprepare(t, "a")
		n.check(t, is{Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
		n.hold(t, claim("b", whole(gpu0)))
		err := n.EnsureUnshared(t.Context(), gpu0)
		if !errors.Is(err, nvml.ErrLost) {
			t.Errorf("a whole GPU that isn't as it was: got %v", err)
		}
		end := n.run(t)
		time.Sleep(time.Minute)
		m.mu.Lock()
		m.fault = nil
		m.mu.Unlock()
		time.Sleep(2 * time.Minute)
		end()
		n.check(t, is{})
	})
}

// TestClosedWhileTheDaemonIsAway checks that a GPU is closed while its daemon is away, and
// then until all clients that didn't find the daemon have failed.
func TestClosedWhileTheDaemonIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.SetClosedFor(2 * time.Second)
		end := n.run(t)
		n.prepare(t, claim("a", share(gpu0, 0)))
		synctest.Wait()
		open := is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}}
		n.check(t, open)
		set := func(phase mps.Phase, pid int) {
			m.do(func() {
				s := m.daemons["gpu-980fb007"]
				s.Phase, s.PID = phase, pid
				m.daemons["gpu-980fb007"] = s
			})
			synctest.Wait()
		}
		closed := closed0
		closed.Daemons = daemonOf0
		set(mps.Starting, 0)
		n.check(t, closed)
		time.Sleep(time.Minute)
		n.check(t, closed)
		set(mps.Running, 8)
		n.check(t, closed)
		time.Sleep(3 * time.Second)
		n.check(t, open)
		set(mps.Running, 9) // the changes in between were missed
		n.check(t, closed)
		// A claim that comes now waits until its clients are let in.
		n.prepare(t, claim("b", share(gpu0, 1)))
		n.check(t, open)
		set(mps.Failed, 0)
		end()
		n = n.restart(t, "boot-1") // starts it again
		n.check(t, open)
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestClosedAndLeft: a closed GPU gets its original mode, also by a plugin that
// finds it so.
func TestClosedAndLeft(t *testing.T) {
	for name, before := range map[string]nvml.ComputeMode{"found open": nvml.ComputeDefault, "found exclusive": nvml.ComputeExclusiveProcess} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				m.modes[gpu0] = before
				n := newNode(t, m)
				end := n.run(t)
				n.prepare(t, claim("a", share(gpu0, 0)))
				m.do(func() {
					m.daemons["gpu-980fb007"] = mps.State{Daemon: daemonOf0[0], Phase: mps.Failed, PipeDir: "/x"}
				})
				synctest.Wait()
				if m.modes[gpu0] != nvml.ComputeProhibited {
					t.Errorf("mode: %s", m.modes[gpu0])
				}
				end()
				n.end()
				n = start(t, m, n.dir, "boot-1", nil)
				n.unprepare(t, "a")
				if err := n.leaveHost(t); err != nil {
					t.Error(err)
				}
				if m.modes[gpu0] != before || len(n.journal.AllSettings()) > 0 {
					t.Errorf("afterwards: mode %s, %+v", m.modes[gpu0], n.journal.AllSettings())
				}
			})
		})
	}
}

// TestModeOfAnAdministrator is never undone, whichever it is. A mode that a reset
// of the GPU took away, with the MPS server, is set again.
func TestModeOfAnAdministrator(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		synctest.Wait() // the supervisor's first report has no daemon that the next claim needs
		n.prepare(t, claim("a", share(gpu0, 0)))
		server := func(pid int) {
			m.do(func() {
				s := m.daemons["gpu-980fb007"]
				s.ServerPID = pid
				m.daemons["gpu-980fb007"] = s
			})
			synctest.Wait()
		}
		server(20)
		for _, mode := range []nvml.ComputeMode{nvml.ComputeProhibited, nvml.ComputeDefault} {
			m.do(func() { m.modes[gpu0] = mode })
			time.Sleep(3 * time.Minute)
			n.prepare(t, claim("b", ofPartition(gpu1, 0)))
			if m.modes[gpu0] != mode {
				t.Errorf("%s was undone: %s", mode, m.modes[gpu0])
			}
		}
		got := n.Conditions()[gpu0]
		if len(got) != 1 || got[0].Type != gpu.ComputeModeChanged || got[0].Blocks() || !strings.Contains(got[0].Message, "-c EXCLUSIVE_PROCESS") {
			t.Errorf("conditions: %v", got)
		}
		server(0)
		m.faults = nil // a mode of the administrator's lets others in beside the daemon
		server(21)
		time.Sleep(3 * time.Minute)
		if got := n.Conditions()[gpu0]; m.modes[gpu0] != nvml.ComputeDefault || len(got) != 1 {
			t.Errorf("with another server: mode %s, conditions %v", m.modes[gpu0], got)
		}
		end()
		n = n.restart(t, "boot-1")
		end = n.run(t)
		server(22)
		if got := n.Conditions()[gpu0]; m.modes[gpu0] != nvml.ComputeDefault || len(got) != 1 {
			t.Errorf("with another server and plugin: mode %s, conditions %v", m.modes[gpu0], got)
		}
		m.do(func() { m.modes[gpu0] = nvml.ComputeExclusiveProcess })
		time.Sleep(3 * time.Minute)
		if got := n.Conditions()[gpu0]; len(got) > 0 {
			t.Errorf("set back by the administrator: conditions %v", got)
		}
		m.do(func() { // the GPU is reset, in one step: a state without a server isn't seen
			m.modes[gpu0] = nvml.ComputeDefault
			s := m.daemons["gpu-980fb007"]
			s.ServerPID = 23
			m.daemons["gpu-980fb007"] = s
		})
		synctest.Wait()
		if got := n.Conditions()[gpu0]; m.modes[gpu0] != nvml.ComputeExclusiveProcess || len(got) > 0 {
			t.Errorf("after a reset: mode %s, conditions %v", m.modes[gpu0], got)
		}
		m.faults = nil // as above
		end()
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestResetThatNobodySaw: a mode that a reset took away while this plugin, or its access
// to the driver, was not there is set again. It isn't taken for an administrator's.
func TestResetThatNobodySaw(t *testing.T) {
	for title, unseen := range map[string]func(t *testing.T, n *node, reset func()) *node{
		"plugin down": func(t *testing.T, n *node, reset func()) *node {
			reset()
			return n.restart(t, "boot-1")
		},
		"driver reloaded": func(t *testing.T, n *node, reset func()) *node {
			n.SetHardware(nil, nil)
			reset()
			synctest.Wait()
			n.SetHardware(n.machine, n.machine.smi)
			n.recover(t)
			return n
		},
	} {
		t.Run(title, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				n := newNode(t, m)
				if title == "driver reloaded" {
					defer n.run(t)()
				}
				n.prepare(t, claim("a", share(gpu0, 0)))
				n = unseen(t, n, func() {
					m.do(func() {
						m.modes[gpu0] = nvml.ComputeDefault
						s := m.daemons["gpu-980fb007"]
						s.ServerPID = 23
						m.daemons["gpu-980fb007"] = s
					})
				})
				n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
				if got := n.Conditions()[gpu0]; len(got) > 0 {
					t.Errorf("conditions: %v", got)
				}
			})
		})
	}
}

// TestResetBeforeTheReport: a mode that a reset took away is set again, and isn't taken
// for an administrator's, when it is read before the supervisor has reported that the
// MPS server is another one.
func TestResetBeforeTheReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		synctest.Wait()
		n.prepare(t, claim("a", share(gpu0, 0)))
		server := func(pid int) {
			s := m.daemons["gpu-980fb007"]
			s.ServerPID = pid
			m.daemons["gpu-980fb007"] = s
		}
		m.do(func() { server(20) })
		synctest.Wait()
		m.mu.Lock() // not with do: the watch doesn't report it
		m.modes[gpu0] = nvml.ComputeDefault
		server(23)
		m.mu.Unlock()
		n.prepare(t, claim("b", share(gpu0, 1)))
		if got := n.Conditions()[gpu0]; m.modes[gpu0] != nvml.ComputeExclusiveProcess || len(got) > 0 {
			t.Errorf("mode %s, conditions %v", m.modes[gpu0], got)
		}
		end()
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}
