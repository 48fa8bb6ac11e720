package sharing_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
)

// TestSupervisorAway: new claims fail with a remedy, prepared ones continue,
// and when it is back daemons and settings are as wanted.
func TestSupervisorAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.prepare(t, claim("b", ofPartition(gpu1, 0)))
		m.do(func() { m.away = true })
		_, err := n.Join(t.Context(), n.hold(t, claim("c", share(gpu0, 1))), nil)
		if !errors.Is(err, mps.ErrUnavailable) {
			t.Errorf("join: got %v", err)
		}
		n.unprepare(t, "c") // others need the daemon
		if err := n.giveUp(t.Context(), "a"); !errors.Is(err, mps.ErrUnavailable) {
			t.Errorf("leave: got %v", err)
		}
		if _, err := n.Join(t.Context(), n.hold(t, claim("a", share(gpu0, 0))), nil); !errors.Is(err, mps.ErrUnavailable) {
			t.Errorf("join again: got %v", err)
		}
		end := n.run(t)
		time.Sleep(time.Minute)
		m.do(func() {
			m.away = false
			clear(m.daemons) // its run directory was wiped
			m.daemons["gpu-22222222"] = mps.State{Daemon: mps.Daemon{Name: "gpu-22222222", Devices: []gpu.UUID{"GPU-2"}}}
			m.daemons["claim-x"] = mps.State{Daemon: mps.Daemon{Name: "claim-x", Devices: []gpu.UUID{"MIG-2"}}}
		})
		time.Sleep(2 * time.Minute)
		n.check(t, is{
			Daemons: []mps.Daemon{
				{Name: "gpu-11111111-mig-1g18gb-0", Devices: []gpu.UUID{"MIG-11111111-0"}, ThreadPercentage: 50, MemoryMiB: []int64{500}},
				{Name: "gpu-980fb007", Devices: []gpu.UUID{gpu0}, ThreadPercentage: 25, MemoryMiB: []int64{1000}},
			},
			Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)},
		})
		end()
		n.unprepare(t, "a")
		n.unprepare(t, "b")
		n.check(t, is{})
	})
}

// TestNoSupervisorAtAll: on a node without one, claims that don't need it
// succeed, and failed ones can be released.
func TestNoSupervisorAtAll(t *testing.T) {
	m := newMachine()
	m.set(func() { m.away = true })
	n := newNode(t, m)
	if err := n.Recover(t.Context()); err != nil {
		t.Error(err)
	}
	n.prepare(t, claim("a", whole(gpu0)))
	n.unprepare(t, "a")
	_, err := n.Join(t.Context(), n.hold(t, claim("b", share(gpu0, 0))), nil)
	wantError(t, err, "tessera-mps")
	n.unprepare(t, "b")
	n.check(t, is{})
	_, _ = n.Join(t.Context(), n.hold(t, claim("c", share(gpu0, 0))), nil)
	n = n.restartAway(t)
	n.unprepare(t, "c")
	if err := n.leaveHost(t); err != nil {
		t.Error(err)
	}
	n.check(t, is{})
}

// TestLeftDaemon: a daemon that an earlier plugin has left, and that no claim needs, keeps
// only the GPUs that it may be on waiting for the supervisor.
func TestLeftDaemon(t *testing.T) {
	for title, c := range map[string]struct {
		daemon  string
		claim   holding.Record // which has a record
		leaving bool
		blocked []gpu.UUID
	}{
		"of a GPU":                  {daemon: "gpu-980fb007", blocked: []gpu.UUID{gpu0}},
		"of a partition":            {daemon: "gpu-980fb007-mig-1g18gb-0", blocked: []gpu.UUID{gpu0}},
		"of a claim that leaves":    {daemon: "claim-x", claim: claim("x", wholeMPS(gpu0, 0)), leaving: true, blocked: []gpu.UUID{gpu0}},
		"of a claim without record": {daemon: "claim-x", blocked: []gpu.UUID{gpu0, gpu1}},
		"that a claim needs alone":  {daemon: "claim-x", claim: claim("x", wholeMPS(gpu0, 0))},
		"that a claim shares":       {daemon: "gpu-980fb007", claim: claim("x", share(gpu0, 0))},
	} {
		t.Run(title, func(t *testing.T) {
			m := newMachine()
			m.set(func() { m.away = true })
			m.daemons[c.daemon] = mps.State{Daemon: mps.Daemon{Name: c.daemon}}
			n := newNode(t, m)
			if c.claim.ClaimUID != "" {
				n.hold(t, c.claim)
			}
			if c.leaving {
				n.journal.AdvancePhase(c.claim.ClaimUID, holding.Leaving)
			}
			for _, uuid := range []gpu.UUID{gpu0, gpu1} {
				blocked := slices.Contains(c.blocked, uuid)
				_, joined := n.Join(t.Context(), n.hold(t, claim(string(uuid), replica(uuid, 0))), nil)
				for what, err := range map[string]error{
					"EnsureUnshared": n.EnsureUnshared(t.Context(), uuid), "AwaitDaemonEnds": n.AwaitDaemonEnds(t.Context(), uuid), "Join of a replica": joined,
				} {
					if errors.Is(err, mps.ErrUnavailable) != blocked || err != nil && !blocked {
						t.Errorf("%s on GPU %s: got %v, want an error: %v", what, uuid, err, blocked)
					}
				}
			}
		})
	}
}

// TestDaemonFails: a fault of a daemon is one of each of its GPUs, from the first report
// until the daemon has a server again.
func TestDaemonFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		changes := 0
		n := startWith(t, m, t.TempDir(), "boot-1", sharing.Config{ExclusiveProcess: true})
		if faults, known := n.DaemonFaults(gpu0); known || len(faults) > 0 {
			t.Errorf("before the supervisor's first report: %v, known: %t", faults, known)
		}
		n.prepare(t, claim("a", wholeMPS(gpu0, 0), wholeMPS(gpu1, 0)))
		end := n.run(t)
		defer end()
		set := func(phase mps.Phase, restarts, server int, trouble string) {
			m.do(func() {
				s := m.daemons["claim-a"]
				s.Phase, s.Restarts, s.ServerPID, s.Message, s.Trouble = phase, restarts, server, "out of luck", trouble
				m.daemons["claim-a"] = s
			})
			synctest.Wait()
		}
		for _, step := range []struct {
			name             string
			phase            mps.Phase
			restarts, server int
			trouble          string
			began            time.Duration // -1: no fault
			message          string
			changes          int
		}{
			{"starts", mps.Starting, 0, 0, "", -1, "", 0},
			{"serves", mps.Running, 0, 7, "", -1, "", 0},
			{"has ended", mps.Failed, 0, 0, "", 0, "out of luck", 1},
			{"starts again", mps.Starting, 1, 0, "", time.Second, "out of luck", 1},
			{"has no server yet", mps.Running, 1, 0, "", 2 * time.Second, "out of luck", 1},
			{"gets none", mps.Running, 1, 0, "it has no server", 3 * time.Second, "delete the pods", 1},
			{"serves again", mps.Running, 1, 8, "", -1, "", 2},
			{"has ended again", mps.Failed, 1, 0, "", 0, "out of luck", 3},
		} {
			set(step.phase, step.restarts, step.server, step.trouble)
			for _, uuid := range []gpu.UUID{gpu0, gpu1} {
				got, known := n.DaemonFaults(uuid)
				if !known || (len(got) == 1) != (step.began >= 0) {
					t.Errorf("%s: faults %v, known: %t", step.name, got, known)
				}
				for _, f := range got {
					if time.Since(f.Since) != step.began || !strings.Contains(f.Message, step.message) {
						t.Errorf("%s: fault %+v after %v, want %v and %q", step.name, f, time.Since(f.Since), step.began, step.message)
					}
				}
			}
			select {
			case <-n.DaemonFaultsChanged():
				changes++
			default:
			}
			if changes != step.changes {
				t.Errorf("%s: %d changes, want %d", step.name, changes, step.changes)
			}
			time.Sleep(time.Second)
		}
		n.unprepare(t, "a")
		if got, _ := n.DaemonFaults(gpu0); len(got) > 0 {
			t.Errorf("after the claim: %v", got)
		}
	})
}

// TestFaultIsWarnedOf: the claims of a daemon are warned once about a fault, however
// often the daemon is restarted in it, and about the next fault again.
func TestFaultIsWarnedOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		var warned []string
		n := startWith(t, m, t.TempDir(), "boot-1", sharing.Config{ExclusiveProcess: true, Warn: func(r holding.Record, reason, message string) {
			if !strings.Contains(message, string(gpu0)) || !strings.Contains(message, "restart those") && !strings.Contains(message, "delete the pods") {
				t.Errorf("message %q doesn't name the GPU or doesn't say what to do", message)
			}
			warned = append(warned, r.Namespace+"/"+r.Name+" "+reason)
		}})
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.prepare(t, claim("b", share(gpu0, 1)))
		n.prepare(t, claim("other", share(gpu1, 0)))
		end := n.run(t)
		defer end()
		pid := 7
		set := func(phase mps.Phase, restarts int, trouble string, server int) {
			m.do(func() {
				s := m.daemons["gpu-980fb007"]
				s.PID, s.Phase, s.Restarts, s.Trouble, s.ServerPID = pid, phase, restarts, trouble, server
				m.daemons["gpu-980fb007"] = s
			})
			synctest.Wait()
		}
		both := []string{"default/a MPSDaemonFailed", "default/b MPSDaemonFailed"}
		set(mps.Running, 0, "", 20)
		for _, step := range []struct {
			name string
			do   func()
			want []string
		}{
			{"no server", func() { set(mps.Running, 0, "it has no server", 0) }, both},
			{"another reason", func() { set(mps.Running, 0, "another process has the GPU", 0) }, nil},
			{"restarted", func() { set(mps.Starting, 1, "", 0) }, nil},
			{"without a server yet", func() { set(mps.Running, 1, "", 0) }, nil},
			{"which it doesn't get", func() { set(mps.Running, 1, "it has no server", 0) }, nil},
			{"another claim", func() { n.prepare(t, claim("c", share(gpu0, 2))) }, nil},
			{"in trouble again", func() { set(mps.Running, 1, "it has no server", 0) }, []string{"default/c MPSDaemonFailed"}},
			{"served", func() { set(mps.Running, 1, "", 21) }, nil},
			{"ended", func() { n.unprepare(t, "c"); set(mps.Failed, 1, "", 0) }, both},
			{"served again", func() { set(mps.Running, 2, "", 22) }, nil},
			{"replaced between two reports", func() { pid++; set(mps.Running, 3, "", 23) }, both},
			{"the same", func() { set(mps.Running, 3, "", 23) }, nil},
		} {
			warned = nil
			step.do()
			if diff := cmp.Diff(step.want, warned, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s: warned (-want +got):\n%s", step.name, diff)
			}
		}
	})
}

// TestNextDaemonIsNoOutage: a claim whose daemon starts when the last share's has
// ended, between two reports of the supervisor, isn't warned of.
func TestNextDaemonIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.set(func() { m.lingers = true })
		var warned []string
		n := startWith(t, m, t.TempDir(), "boot-1", sharing.Config{
			ExclusiveProcess: true, Warn: func(r holding.Record, _, message string) { warned = append(warned, r.Name+": "+message) },
		})
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.unprepare(t, "a")
		time.AfterFunc(time.Second, m.end)
		n.prepare(t, claim("b", share(gpu0, 1)))
		if pid := m.daemons["gpu-980fb007"].PID; pid != 2 || len(warned) > 0 {
			t.Errorf("with daemon %d: warned %v", pid, warned)
		}
	})
}

// TestCrashWhileADaemonEnds: the next plugin waits for it and puts the mode back.
func TestCrashWhileADaemonEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.set(func() { m.lingers = true })
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.unprepare(t, "a")
		time.AfterFunc(time.Second, m.end)
		n = n.restart(t, "boot-1")
		n.check(t, is{})
	})
}
