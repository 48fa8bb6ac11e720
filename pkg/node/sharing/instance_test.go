package sharing_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// daemonOfPartition is the name of the daemon of ofPartition(gpu0, 0).
const daemonOfPartition = "gpu-980fb007-mig-1g18gb-0"

// record writes the record that the partition was created as this MIG device, or, if that is
// empty, is being created. If there is false, the record has no partition.
func (n *node) record(t *testing.T, mig gpu.UUID, there bool) {
	t.Helper()
	r := holding.GPURecord{GPU: gpu0, BootID: n.boot}
	if there {
		made := holding.MadePartition{Partition: ofPartition(gpu0, 0).Partition}
		if mig != "" {
			made.Made = &holding.MadeInstance{GPUInstanceID: 7, UUID: mig}
		}
		r.Partitions = []holding.MadePartition{made}
	}
	if err := n.journal.PutGPU(r); err != nil {
		t.Fatal(err)
	}
}

// reported makes the supervisor report a change of another daemon.
func (n *node) reported() {
	n.machine.do(func() {
		n.machine.daemons["claim-other"] = mps.State{Daemon: mps.Daemon{Name: "claim-other", Devices: []gpu.UUID{gpu1}}, Phase: mps.Ending}
	})
	time.Sleep(5 * time.Minute)
	synctest.Wait()
}

// isOn fails unless the partition's daemon is on these devices; none: there is no daemon.
func (n *node) isOn(t *testing.T, when string, want ...gpu.UUID) {
	t.Helper()
	n.machine.mu.Lock()
	defer n.machine.mu.Unlock()
	got, there := n.machine.daemons[daemonOfPartition]
	if there != (len(want) > 0) || there && got.Devices[0] != want[0] {
		t.Errorf("%s: there is a daemon: %t, on %v, want %v", when, there, got.Devices, want)
	}
}

// TestInstanceOfTheMoment: the daemon of a partition is never started on the MIG device
// that the partition was for an earlier claim, or before the driver was loaded again: it
// may be another claim's by now.
func TestInstanceOfTheMoment(t *testing.T) {
	t.Run("created by Tessera", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, newMachine())
			end := n.run(t)
			n.record(t, "MIG-1", true)
			r := n.hold(t, claim("a", ofPartition(gpu0, 0)))
			if _, err := n.Join(t.Context(), r, instances(r, "MIG-1")); err != nil {
				t.Fatal(err)
			}
			n.isOn(t, "the first claim", "MIG-1")
			n.record(t, "", true)
			n.machine.do(func() { clear(n.machine.daemons) }) // as a driver that is loaded again does
			n.reported()
			n.isOn(t, "the partition is being created again")
			n.record(t, "MIG-2", true)
			n.reported()
			n.isOn(t, "the partition is another MIG device", "MIG-2")
			n.unprepare(t, "a")
			n.record(t, "", false)
			r = n.hold(t, claim("b", ofPartition(gpu0, 0)))
			n.reported()
			n.isOn(t, "the second claim's partition isn't created yet")
			n.record(t, "MIG-3", true)
			if _, err := n.Join(t.Context(), r, instances(r, "MIG-3")); err != nil {
				t.Fatal(err)
			}
			n.isOn(t, "the second claim", "MIG-3")
			end()
		})
	})
	t.Run("created by others", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, newMachine())
			end := n.run(t)
			r := n.hold(t, claim("a", ofPartition(gpu0, 0)))
			if _, err := n.Join(t.Context(), r, instances(r, "MIG-1")); err != nil {
				t.Fatal(err)
			}
			n.isOn(t, "the first claim", "MIG-1")
			n.machine.do(func() { clear(n.machine.daemons) })
			n.reported()
			n.isOn(t, "the daemon was lost", "MIG-1")
			n.unprepare(t, "a")
			r = n.hold(t, claim("b", ofPartition(gpu0, 0)))
			n.reported()
			n.isOn(t, "which device the second claim has isn't known yet")
			if _, err := n.Join(t.Context(), r, instances(r, "MIG-2")); err != nil {
				t.Fatal(err)
			}
			n.isOn(t, "the second claim", "MIG-2")
			end()
		})
	})
}

// TestClaimWithoutJoin: while a prepare makes a recorded claim's devices ready, no daemon is
// started and no setting is changed for the claim, because its partition may still be
// being destroyed after an earlier claim, and its GPU may be in MIG mode.
func TestClaimWithoutJoin(t *testing.T) {
	t.Run("partition that is being destroyed", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, newMachine())
			end := n.run(t)
			n.record(t, "MIG-1", true)
			r := n.hold(t, claim("a", ofPartition(gpu0, 0)))
			if _, err := n.Join(t.Context(), r, instances(r, "MIG-1")); err != nil {
				t.Fatal(err)
			}
			n.unprepare(t, "a") // its partition is being destroyed
			r = n.hold(t, claim("b", ofPartition(gpu0, 0)))
			n.reported()
			n.isOn(t, "the partition is being destroyed")
			n.record(t, "MIG-2", true)
			if _, err := n.Join(t.Context(), r, instances(r, "MIG-2")); err != nil {
				t.Fatal(err)
			}
			n.isOn(t, "the partition was created again", "MIG-2")
			end()
		})
	})
	t.Run("whole GPU", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, newMachine())
			end := n.run(t)
			n.SetTimeSlices(policy)
			n.hold(t, claim("a", share(gpu0, 0)))
			n.hold(t, claim("b", wholeMPS(gpu1, 10)))
			n.hold(t, claim("c", replica(gpu1, 0)))
			n.reported()
			n.machine.do(func() { delete(n.machine.daemons, "claim-other") })
			n.check(t, is{})
			end()
		})
	})
}

// TestPrepareThatAnEarlierPluginBegan: a plugin that starts again does nothing for a claim
// that has a record and no CDI spec, until its next prepare has made its devices ready: the
// claim's GPUs may be in MIG mode.
func TestPrepareThatAnEarlierPluginBegan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, newMachine())
		r := n.hold(t, claim("a", share(gpu0, 0)))
		n.hold(t, claim("b", wholeSlice(gpu1, "Long")))
		n.end()
		n = start(t, n.machine, n.dir, "boot-1", nil)
		end := n.run(t)
		defer end()
		if err := n.Recover(t.Context()); err != nil {
			t.Error(err)
		}
		n.reported()
		n.machine.do(func() { delete(n.machine.daemons, "claim-other") })
		n.check(t, is{})
		n.prepare(t, r)
		n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
	})
}

// TestKeptForClaimWithoutJoin: the last claim that uses a daemon leaves while another one
// that needs it is being prepared. The daemon and the compute mode stay, and go if that
// prepare fails.
func TestKeptForClaimWithoutJoin(t *testing.T) {
	n := newNode(t, newMachine())
	n.prepare(t, claim("a", share(gpu0, 0)))
	n.hold(t, claim("b", share(gpu0, 1)))
	n.unprepare(t, "a")
	n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
	n.unprepare(t, "b")
	n.check(t, is{})
}

// TestModeIsRestoredForPartition: a claim that is to have a partition of a GPU doesn't keep the
// compute mode that earlier claims needed of the whole GPU.
func TestModeIsRestoredForPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.set(func() { m.lingers = true })
		n := newNode(t, m)
		end := n.run(t)
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.unprepare(t, "a")
		n.hold(t, claim("b", ofPartition(gpu0, 0)))
		m.end()
		time.Sleep(5 * time.Second)
		n.check(t, is{})
		end()
	})
}

// TestDaemonOfARestartedPlugin: a plugin that starts again starts a daemon that is missing
// also for claims that it can't prepare again.
func TestDaemonOfARestartedPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		n := newNode(t, m)
		n.prepare(t, claim("a", share(gpu0, 0)))
		n.end()
		m.do(func() { clear(m.daemons) })
		n = start(t, m, n.dir, "boot-1", nil)
		end := n.run(t)
		time.Sleep(5 * time.Second)
		n.check(t, is{Daemons: daemonOf0, Modes: exclusive0, Settings: []holding.Settings{changedMode(gpu0)}})
		end()
	})
}

// instances returns the answer of the partitions' Manager for a claim with one partition.
func instances(r holding.Record, mig gpu.UUID) map[gpu.Partition]gpu.Instance {
	return map[gpu.Partition]gpu.Instance{r.Holdings[0].Base().(gpu.Partition): {UUID: mig}}
}
