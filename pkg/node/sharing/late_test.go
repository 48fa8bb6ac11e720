package sharing_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// TestReportArrivesLate: a report that the supervisor has made before a daemon was
// started or stopped, and that arrives after the reply, changes nothing.
func TestReportArrivesLate(t *testing.T) {
	t.Run("of a start", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newMachine()
			n := newNode(t, m)
			m.set(func() { m.lag = time.Second })
			modes := m.watchModes()
			end := n.run(t)
			synctest.Wait() // the report without daemons is on its way
			n.prepare(t, claim("a", share(gpu0, 0)))
			time.Sleep(10 * time.Second)
			if slices.Contains(modes(), nvml.ComputeProhibited) {
				t.Errorf("a GPU whose daemon runs was closed: %v", modes())
			}
			n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
			end()
		})
	})
	t.Run("of a stop", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newMachine()
			n := newNode(t, m)
			n.prepare(t, claim("a", share(gpu0, 0)))
			m.set(func() { m.lag = time.Second })
			end := n.run(t)
			synctest.Wait() // the report with the daemon is on its way
			n.unprepare(t, "a")
			time.Sleep(10 * time.Second)
			n.check(t, is{})
			end()
		})
	})
	t.Run("of the beginning of a stop", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newMachine()
			m.set(func() { m.lingers = true })
			n := newNode(t, m)
			n.prepare(t, claim("a", share(gpu0, 0)))
			m.set(func() { m.lag = time.Second })
			end := n.run(t)
			synctest.Wait() // the report with the daemon is on its way
			n.unprepare(t, "a")
			time.Sleep(5 * time.Second)
			m.end()
			time.Sleep(5 * time.Second)
			n.check(t, is{})
			end()
		})
	})
}

// TestRecoverDuringAStart: while Recover waits for a report that takes long, a daemon is
// started. Its GPU isn't closed, and what the report says of others counts.
func TestRecoverDuringAStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("x", share(gpu1, 0)))
		n.journal.AdvancePhase("x", holding.Leaving) // an orphan, once the list has been read
		m.set(func() { m.lag = time.Second })
		listed := make(chan error, 1)
		go func() { listed <- n.Recover(t.Context()) }()
		synctest.Wait()
		modes := m.watchModes()
		n.prepare(t, claim("a", share(gpu0, 0)))
		if err := <-listed; err != nil {
			t.Error(err)
		}
		end := n.run(t)
		time.Sleep(10 * time.Second)
		if slices.Contains(modes(), nvml.ComputeProhibited) {
			t.Errorf("a GPU whose daemon runs was closed: %v", modes())
		}
		n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
		end()
	})
}

// TestReplyArrivesLate: the reply to a start that arrives after the report of the
// daemon's death doesn't make it run again.
func TestReplyArrivesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		synctest.Wait()
		m.set(func() {
			m.step = func(step string) {
				if step != "machine.ensured" {
					return
				}
				m.step = func(string) {}
				m.do(func() { m.die("gpu-980fb007") })
				synctest.Wait() // the report has arrived before the reply
			}
		})
		n.prepare(t, claim("a", share(gpu0, 0)))
		if got, _ := n.DaemonFaults(gpu0); len(got) != 1 || !strings.Contains(got[0].Message, "has ended") {
			t.Errorf("faults of a dead daemon: %v", got)
		}
		end()
	})
}

// TestSupervisorWithoutRevisions: reports of a supervisor of an earlier release count
// in the order in which they arrive, also after one of this release.
func TestSupervisorWithoutRevisions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		synctest.Wait()
		n.prepare(t, claim("a", share(gpu0, 0)))
		m.do(func() { m.old = true })
		synctest.Wait()
		m.do(func() { m.die("gpu-980fb007") })
		synctest.Wait()
		if got, _ := n.DaemonFaults(gpu0); len(got) != 1 {
			t.Errorf("faults of a dead daemon: %v", got)
		}
		m.do(func() {
			s := m.daemons["gpu-980fb007"]
			s.Phase, s.PID = mps.Running, 8
			m.daemons["gpu-980fb007"] = s
		})
		time.Sleep(5 * time.Second)
		n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
		end()
		n.unprepare(t, "a")
		n.check(t, is{})
	})
}

// TestLeavesAfterTheWatch: a claim that is withdrawn while the plugin ends, after Run has
// returned, leaves nothing and waits for no report.
func TestLeavesAfterTheWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, newMachine())
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.unwatch()
		began := time.Now()
		n.unprepare(t, "a")
		if waited := time.Since(began); waited != 0 {
			t.Errorf("waited %s", waited)
		}
		n.check(t, is{})
	})
}
