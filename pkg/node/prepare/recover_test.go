package prepare_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
)

func TestRecover(t *testing.T) {
	f := newFixture(t, 3)
	for n := range 3 {
		mustPrepare(t, f, newClaim(fmt.Sprintf("claim-%d", n), result("gpu", n)))
	}
	if err := os.RemoveAll(f.node.cdi); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(f.node.cdi, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := f.specs.Write(holding.Realized{Record: holding.Record{ClaimUID: "orphan", Holdings: []holding.Holding{holding.New(gpuName(0), gpu.Whole{GPU: uuidOf(0)})}}}); err != nil {
		t.Fatal(err)
	}
	f.journal.Close()
	f = start(t, f.node, "boot-2", nil)
	f.lose(1)
	err := f.Recover(testContext(t))
	if err == nil || !strings.Contains(err.Error(), "default/claim-1") || strings.Contains(err.Error(), "claim-2") {
		t.Errorf("got %v, want an error about claim-1 alone", err)
	}
	specs, err := f.specs.Claims()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"claim-0", "claim-2"}, specs); diff != "" {
		t.Errorf("specs (-want +got):\n%s", diff)
	}
	if got := len(f.journal.Claims()); got != 3 {
		t.Errorf("%d records, want all 3", got)
	}
	mustUnprepare(t, f, newClaim("claim-1"))
	checkHeld(t, f, "claim-0", "claim-2")
}

// damaged returns the node after its plugin started again with a damaged record of the
// claim.
func (f *fixture) damaged(t *testing.T, claimUID string) *fixture {
	t.Helper()
	f.journal.Close()
	damage(t, filepath.Join(f.node.journal, claimUID+".json"))
	f = start(t, f.node, "boot-1", nil)
	if err := f.Recover(testContext(t)); err != nil {
		t.Errorf("recover: %v", err)
	}
	return f
}

func TestUnreadableRecord(t *testing.T) {
	// broken is a node where claim "broken" has GPU 0 and a damaged record.
	broken := func(t *testing.T) *fixture {
		f := newFixture(t, 2)
		mustPrepare(t, f, newClaim("broken", result("gpu", 0)))
		return f.damaged(t, "broken")
	}
	t.Run("is a condition of its GPU and keeps its spec", func(t *testing.T) {
		f := broken(t)
		got := f.Conditions()
		if len(got) != 1 || len(got[uuidOf(0)]) != 1 || got[uuidOf(0)][0].Type != gpu.StateUnreadable {
			t.Errorf("conditions: got %v, want GPU 0 StateUnreadable", got)
		}
		specs, err := f.specs.Claims()
		if err != nil || !cmp.Equal(specs, []string{"broken"}) {
			t.Errorf("specs: got %v, %v, want broken's", specs, err)
		}
		mustPrepare(t, f, newClaim("elsewhere", result("gpu", 1)))
		f.server.set("broken", inUse)
		if _, err := f.Prepare(testContext(t), newClaim("thief", result("gpu", 0))); !errors.Is(err, prepare.ErrHeld) {
			t.Errorf("another claim: got %v, want ErrHeld", err)
		}
	})
	t.Run("is mended by a prepare", func(t *testing.T) {
		f := broken(t)
		mustPrepare(t, f, newClaim("broken", result("gpu", 0)))
		checkHeld(t, f, "broken")
		if reread := f.facts.BeginReading(); len(f.Conditions()) != 0 || !reread {
			t.Errorf("conditions %v, the GPUs are read again: %t, want none, and that they are", f.Conditions(), reread)
		}
	})
	t.Run("holds on when a prepare fails", func(t *testing.T) {
		f := broken(t)
		show := hideDeviceNode(t, 0)
		if _, err := f.Prepare(testContext(t), newClaim("broken", result("gpu", 0))); err == nil {
			t.Error("prepared without a device node")
		}
		show()
		checkHeld(t, f, "broken")
	})
	t.Run("is settled by an unprepare", func(t *testing.T) {
		f := broken(t)
		mustUnprepare(t, f, newClaim("broken"))
		checkHeld(t, f)
		if reread := f.facts.BeginReading(); len(f.Conditions()) != 0 || !reread {
			t.Errorf("conditions %v, the GPUs are read again: %t, want none, and that they are", f.Conditions(), reread)
		}
	})
}

func TestAfterARebootPartitionsWaitForTheKubelet(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", part("p", 0, "1g.10gb", 0))
	mustPrepare(t, f, c)
	f.journal.Close()
	f.node.reboot(t)
	f = start(t, f.node, "boot-2", nil)
	if err := f.Recover(testContext(t)); err != nil {
		t.Error(err)
	}
	if specs, err := f.specs.Claims(); err != nil || len(specs) > 0 {
		t.Errorf("specs %v, %v: a spec names an instance of another boot", specs, err)
	}
	mustMend(t, f)
	if there := f.node.instances(t); len(there) > 0 {
		t.Errorf("%v made without the kubelet", there)
	}
	checkHeld(t, f, "c")
	mustPrepare(t, f, c)
	checkHeld(t, f, "c")
}

// TestUnreadableRecordOfAPartition checks that an unprepare releases the devices that the
// damaged file names.
func TestUnreadableRecordOfAPartition(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", part("p", 0, "1g.10gb", 0))
	mustPrepare(t, f, c)
	f = f.damaged(t, "c")
	if n := len(f.node.instances(t)); n != 1 {
		t.Errorf("%d partitions, want that of the claim", n)
	}
	mustUnprepare(t, f, c)
	checkHeld(t, f)
}

// TestRecoverShares: a daemon that was ended runs again; if it can't, other
// claims keep theirs.
func TestRecoverShares(t *testing.T) {
	f := newFixture(t, 2)
	a, b, c := newClaim("a", share("s", 0, 4, 0)), newClaim("b", shareOf("s", 1, "3g.40gb", 0, 2, 1)), newClaim("c", part("p", 1, "3g.40gb", 4))
	for _, one := range []*resourceapi.ResourceClaim{a, b, c} {
		mustPrepare(t, f, one)
	}
	f.journal.Close()
	f.node.reboot(t) // the driver was reloaded
	f = start(t, f.node, "boot-1", nil)
	f.node.daemons.SetFault(func(_, daemon string) error {
		if daemon == string(gpu0) {
			return errors.New("the MPS daemon ends at once")
		}
		return nil
	})
	err := f.Recover(testContext(t))
	if err == nil || !strings.Contains(err.Error(), "default/a") || strings.Contains(err.Error(), "default/b") {
		t.Errorf("got %v, want an error about a alone", err)
	}
	f.node.daemons.SetFault(nil)
	if err := f.Recover(testContext(t)); err != nil {
		t.Error(err)
	}
	checkHeld(t, f, "a", "b", "c")
}

func TestMendMakesThePartitionOfAShareAgain(t *testing.T) {
	f := newFixture(t, 1)
	mustPrepare(t, f, newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 0)))
	f.node.destroy(t, gpu.Partition{GPU: uuidOf(0), Profile: "3g.40gb", Placement: gpu.Placement{Size: 4}})
	mustMend(t, f)
	checkHeld(t, f, "c")
}

func TestAfterARebootSharesWaitForTheKubelet(t *testing.T) {
	for name, c := range map[string]*resourceapi.ResourceClaim{
		"a share":     newClaim("c", share("s", 0, 4, 0)),
		"a replica":   newClaim("c", replica("r", 0, 4, 0)),
		"MPS":         configured(newClaim("c", result("g", 0)), `{"strategy":"MPS"}`),
		"time slices": configured(newClaim("c", result("g", 0)), `{"strategy":"TimeSlicing"}`),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			mustPrepare(t, f, c)
			f.journal.Close()
			f.node.reboot(t)
			f = start(t, f.node, "boot-2", nil)
			if err := f.Recover(testContext(t)); err != nil {
				t.Error(err)
			}
			mustMend(t, f)
			if specs, err := f.specs.Claims(); err != nil || len(specs) > 0 {
				t.Errorf("specs %v, %v: a spec names what went with another boot", specs, err)
			}
			checkHeld(t, f, "c")
			mustPrepare(t, f, c)
			checkHeld(t, f, "c")
		})
	}
}

// TestUnreadableRecordOfAShare: an unprepare stops the daemon that follows from
// the device's name; other shares stay.
func TestUnreadableRecordOfAShare(t *testing.T) {
	for name, alone := range map[string]bool{"alone": true, "beside another": false} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			c := newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 0))
			mustPrepare(t, f, c)
			var left []string
			if !alone {
				mustPrepare(t, f, newClaim("d", shareOf("s", 0, "3g.40gb", 0, 2, 1)))
				left = []string{"d"}
			}
			f = f.damaged(t, "c")
			mustUnprepare(t, f, c)
			checkHeld(t, f, left...)
		})
	}
}

func damage(t *testing.T, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data[:len(data)-4], 0o600); err != nil {
		t.Fatal(err)
	}
}
