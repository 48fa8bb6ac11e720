package sharing_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// TestStopThatHangs: while a daemon that no claim needs doesn't end, the reports
// about other GPUs' daemons are followed at once.
func TestStopThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		end := n.run(t)
		n.prepare(t, claim("a", share(gpu0, 0)))
		synctest.Wait()
		released := make(chan struct{})
		m.do(func() {
			m.fault = func(call string) error {
				if call == "stop claim-x" {
					<-released
				}
				return nil
			}
			m.daemons["claim-x"] = mps.State{Daemon: mps.Daemon{Name: "claim-x", Devices: []gpu.UUID{gpu1}}, Phase: mps.Running}
			m.daemons["claim-y"] = mps.State{Daemon: mps.Daemon{Name: "claim-y", Devices: []gpu.UUID{"GPU-2"}}, Phase: mps.Ending}
		})
		synctest.Wait()
		m.do(func() {
			s := m.daemons["gpu-980fb007"]
			s.Phase, s.PID = mps.Starting, 0
			m.daemons["gpu-980fb007"] = s
		})
		synctest.Wait()
		m.mu.Lock()
		if m.modes[gpu0] != nvml.ComputeProhibited {
			t.Errorf("the GPU whose daemon has died is in mode %s", m.modes[gpu0])
		}
		m.mu.Unlock()
		close(released)
		synctest.Wait()
		m.do(func() {
			if _, there := m.daemons["claim-x"]; there {
				t.Error("a daemon that no claim needs is left")
			}
			delete(m.daemons, "claim-y")
			s := m.daemons["gpu-980fb007"]
			s.Phase, s.PID = mps.Running, 8
			m.daemons["gpu-980fb007"] = s
		})
		time.Sleep(3 * time.Second)
		if stops := m.count("stop claim-y"); stops != 0 {
			t.Errorf("a daemon that was being stopped has been stopped %d times", stops)
		}
		n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
		end()
		n.unprepare(t, "a")
		n.check(t, is{})
	})
}

// TestDaemonOfAnEarlierPlugin: without a compute mode in the journal, a plugin that
// starts while the supervisor is away learns of a daemon's end only from the daemon's
// remaining files. Claims of the GPU wait for that, and no others.
func TestDaemonOfAnEarlierPlugin(t *testing.T) {
	for name, next := range map[string]func(t *testing.T, n *node, uuid gpu.UUID) error{
		"whole GPU": func(t *testing.T, n *node, uuid gpu.UUID) error {
			n.hold(t, claim("b", whole(uuid)))
			err := n.EnsureUnshared(t.Context(), uuid)
			return err
		},
		"partition": func(t *testing.T, n *node, uuid gpu.UUID) error { return n.AwaitDaemonEnds(t.Context(), uuid) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				m.exclusive, m.lingers = false, true
				n := newNode(t, m)
				n.prepare(t, claim("a", share(gpu0, 0)))
				n.unprepare(t, "a")
				m.do(func() { m.away = true })
				n.end()
				n = start(t, m, n.dir, "boot-1", nil)
				if err := n.Recover(t.Context()); err != nil {
					t.Error(err)
				}
				if err := next(t, n, gpu0); !errors.Is(err, mps.ErrUnavailable) {
					t.Errorf("with a daemon that may be there: %v", err)
				}
				if err := next(t, n, gpu1); err != nil {
					t.Errorf("another GPU: %v", err)
				}
				m.do(func() { m.away = false })
				time.AfterFunc(time.Second, m.end)
				if err := next(t, n, gpu0); err != nil {
					t.Error(err)
				}
				n.check(t, is{})
			})
		})
	}
}
