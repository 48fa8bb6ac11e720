package prepare_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/files/filestest"
	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// TestLeavingAndJoining has claims with shares of one GPU and of one partition
// come and go at the same time, in every order that comes up.
func TestLeavingAndJoining(t *testing.T) {
	f := newFixture(t, 1)
	ctx := testContext(t)
	shares := func(n int) *resourceapi.ResourceClaim {
		return newClaim(fmt.Sprintf("claim-%d", n), shareOf("s", 0, "3g.40gb", 0, 4, n))
	}
	for round := range 100 {
		var wg sync.WaitGroup
		for n := range 4 {
			c := shares(n)
			wg.Go(func() {
				for range 1 + (round+n)%3 {
					if _, err := f.Prepare(ctx, c); err != nil {
						t.Errorf("prepare: %v", err)
					}
					if err := f.Unprepare(ctx, named(c)); err != nil {
						t.Errorf("unprepare: %v", err)
					}
				}
			})
		}
		wg.Wait()
		if t.Failed() {
			break
		}
	}
	checkHeld(t, f)
}

// TestTwoLeaveAtOnce lets neither of two claims go on before the other has come as
// far: the partition goes, and nobody runs into the other's daemon.
func TestTwoLeaveAtOnce(t *testing.T) {
	a, b := newClaim("a", shareOf("s", 0, "3g.40gb", 0, 2, 0)), newClaim("b", shareOf("s", 0, "3g.40gb", 0, 2, 1))
	for _, together := range []string{"unprepare.removed", "unprepare.left"} {
		t.Run(together, func(t *testing.T) {
			var mu sync.Mutex
			arrived, both := 0, make(chan struct{})
			f := start(t, newNode(t, 1), "boot-1", func(step string) {
				if step != together {
					return
				}
				mu.Lock()
				if arrived++; arrived == 2 {
					close(both)
				}
				mu.Unlock()
				<-both
			})
			mustPrepare(t, f, a)
			mustPrepare(t, f, b)
			ctx := testContext(t)
			var wg sync.WaitGroup
			for _, c := range []*resourceapi.ResourceClaim{a, b} {
				wg.Go(func() {
					if err := f.Unprepare(ctx, named(c)); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			checkHeld(t, f)
		})
	}
}

// TestLeavesWhileAnotherReleases: while a claim releases the partition, another gets a
// share of it and begins to leave. The partition stays until the daemon of that one is
// stopped.
func TestLeavesWhileAnotherReleases(t *testing.T) {
	a, b := newClaim("a", shareOf("s", 0, "3g.40gb", 0, 2, 0)), newClaim("b", shareOf("s", 0, "3g.40gb", 0, 2, 1))
	var releasing atomic.Bool
	bLeaving, aGone, bGone := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	var f *fixture
	f = start(t, newNode(t, 1), "boot-1", func(step string) {
		switch {
		case step == "unprepare.left" && !releasing.Swap(true): // a's
			mustPrepare(t, f, b)
			go func() { bGone <- f.Unprepare(testContext(t), named(b)) }()
			<-bLeaving
		case step == "unprepare.unmarked" && releasing.Load(): // b's
			close(bLeaving)
			<-aGone
		}
	})
	mustPrepare(t, f, a)
	mustUnprepare(t, f, a)
	if len(f.node.instances(t)) != 1 || len(f.node.runningDaemons(t)) != 1 {
		t.Errorf("partitions %v, daemons %v, want those of b", f.node.instances(t), f.node.runningDaemons(t))
	}
	close(aGone)
	if err := <-bGone; err != nil {
		t.Error(err)
	}
	checkHeld(t, f)
}

// TestLeavesWhileAnotherIsRecorded checks that a shared partition is destroyed if its last
// claim is unprepared while the first write of another claim's record is failing. That
// record counts as a user, so the prepare that fails must release the partition.
func TestLeavesWhileAnotherIsRecorded(t *testing.T) {
	a, b := newClaim("a", shareOf("s", 0, "3g.40gb", 0, 2, 0)), newClaim("b", shareOf("s", 0, "3g.40gb", 0, 2, 1))
	node := newNode(t, 1)
	disk := filestest.New(t, t.TempDir(), filestest.Tree{})
	node.journal = disk.Dir
	aReleasing, bRecorded, aReleased, aGone := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan error, 1)
	var releasing, released sync.Once
	f := start(t, node, "boot-1", func(step string) {
		switch step {
		case "unprepare.left":
			releasing.Do(func() {
				close(aReleasing)
				<-bRecorded
			})
		case "unprepare.released":
			released.Do(func() { close(aReleased) })
		}
	})
	mustPrepare(t, f, a)
	go func() { aGone <- f.Unprepare(testContext(t), named(a)) }()
	<-aReleasing
	failed := false
	disk.Fail(func(op filestest.Op) syscall.Errno {
		if failed || op.Call != "fsync" || op.Path != "." {
			return 0
		}
		failed = true
		close(bRecorded)
		<-aReleased
		return syscall.EIO
	})
	if _, err := f.Prepare(testContext(t), b); !errors.Is(err, syscall.EIO) {
		t.Errorf("got %v, want EIO", err)
	}
	if err := <-aGone; err != nil {
		t.Error(err)
	}
	checkHeld(t, f)
}

// TestLeavesBeforeAnotherIsRecorded checks the same of a first write that fails before the
// record can be on disk: that record is no user, and nothing of it is undone.
func TestLeavesBeforeAnotherIsRecorded(t *testing.T) {
	for step, fails := range map[string]string{"journal.put.created": "write", "journal.put.written": "fsync"} {
		t.Run(fails, func(t *testing.T) {
			a, b := newClaim("a", shareOf("s", 0, "3g.40gb", 0, 2, 0)), newClaim("b", shareOf("s", 0, "3g.40gb", 0, 2, 1))
			node := newNode(t, 1)
			disk := filestest.New(t, t.TempDir(), filestest.Tree{})
			node.journal = disk.Dir
			var recording atomic.Bool
			var f *fixture
			f = start(t, node, "boot-1", func(reached string) {
				if reached == step && recording.Swap(false) {
					mustUnprepare(t, f, a)
					disk.Fail(func(op filestest.Op) syscall.Errno {
						if op.Call == fails && strings.HasPrefix(op.Path, "b.json") {
							return syscall.EIO
						}
						return 0
					})
				}
			})
			mustPrepare(t, f, a)
			recording.Store(true)
			if _, err := f.Prepare(testContext(t), b); !errors.Is(err, syscall.EIO) {
				t.Errorf("got %v, want EIO", err)
			}
			if i := f.node.instances(t); len(i) != 0 {
				t.Errorf("partitions %v are left of claims that are gone", i)
			}
			checkHeld(t, f)
		})
	}
}

// TestJoinFails: a first prepare is undone, a later one leaves what there was.
func TestJoinFails(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 0))
	broken := errors.New("the MPS daemon ends at once")
	fault := func(call, _ string) error {
		if call == "ensure" {
			return broken
		}
		return nil
	}
	f.node.daemons.SetFault(fault)
	if _, err := f.Prepare(testContext(t), c); !errors.Is(err, broken) {
		t.Errorf("got %v, want %v", err, broken)
	}
	checkHeld(t, f)
	f.node.daemons.SetFault(nil)
	mustPrepare(t, f, c)
	if err := f.node.daemons.Reboot(); err != nil { // they have to be started again
		t.Fatal(err)
	}
	f.node.daemons.SetFault(fault)
	if _, err := f.Prepare(testContext(t), c); !errors.Is(err, broken) {
		t.Errorf("again: got %v, want %v", err, broken)
	}
	f.node.daemons.SetFault(nil)
	if diff := cmp.Diff([]string{"c"}, f.names()); diff != "" || len(f.node.instances(t)) != 1 {
		t.Errorf("partitions %v, prepared claims (-want +got):\n%s", f.node.instances(t), diff)
	}
	mustPrepare(t, f, c)
	checkHeld(t, f, "c")
}

// TestNotAsItWas: a GPU that isn't as it was before others shared it isn't
// prepared as a whole for any claim; running daemons stay.
func TestNotAsItWas(t *testing.T) {
	f := newFixture(t, 2)
	c, p := newClaim("c", result("gpu", 0)), newClaim("p", part("p", 1, "3g.40gb", 4))
	left := holding.Settings{GPU: uuidOf(0), BootID: "boot-1", ComputeModeBefore: string(nvml.ComputeDefault)} // by a plugin that was killed
	if err := errors.Join(f.journal.PutSettings(left), f.node.sim.SetComputeMode(uuidOf(0), nvml.ComputeExclusiveProcess)); err != nil {
		t.Fatal(err)
	}
	end := f.node.fail(t, "DeviceSetComputeMode", nvmlsim.NoPermission)
	if _, err := f.Prepare(testContext(t), c); err == nil || !strings.Contains(err.Error(), "left it as it was") {
		t.Errorf("got %v, want that the compute mode can't be set", err)
	}
	mustPrepare(t, f, p)
	mustPrepare(t, f, newClaim("look", adminResult("gpu", 0)))
	if diff := cmp.Diff([]string{"look", "p"}, f.names()); diff != "" {
		t.Errorf("prepared claims (-want +got):\n%s", diff)
	}
	end()
	mustPrepare(t, f, c)
	checkHeld(t, f, "c", "look", "p")
	f.node.fail(t, "DeviceSetComputeMode", nvmlsim.NoPermission)
	mustUnprepare(t, f, c)
}

// TestModeIsPutBackAtTheSecondTry: a GPU that refuses once to have its compute mode put back for a
// claim of the whole GPU hasn't refused the claim.
func TestModeIsPutBackAtTheSecondTry(t *testing.T) {
	f := newFixture(t, 1)
	left := holding.Settings{GPU: uuidOf(0), BootID: "boot-1", ComputeModeBefore: string(nvml.ComputeDefault)} // by a plugin that was killed
	if err := errors.Join(f.journal.PutSettings(left), f.node.sim.SetComputeMode(uuidOf(0), nvml.ComputeExclusiveProcess)); err != nil {
		t.Fatal(err)
	}
	if err := f.node.machine.Fault(nvmlsim.Fault{Call: "DeviceSetComputeMode", GPU: 0, Code: nvmlsim.Unknown, Count: 1}); err != nil {
		t.Fatal(err)
	}
	mustPrepare(t, f, newClaim("c", result("gpu", 0)))
	if got := f.outcomes(t); got != nil {
		t.Errorf("%q", got)
	}
}

// TestLeaveFails: the record stays, and the partition, until the next try.
func TestLeaveFails(t *testing.T) {
	f := newFixture(t, 1)
	c, d := newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 0)), newClaim("d", shareOf("s", 0, "3g.40gb", 0, 2, 1))
	mustPrepare(t, f, c)
	mustPrepare(t, f, d)
	f.node.daemons.SetAway(true)
	for _, one := range []*resourceapi.ResourceClaim{c, d} {
		err := f.Unprepare(testContext(t), named(one))
		if last := one == d; last != errors.Is(err, mps.ErrUnavailable) {
			t.Errorf("unprepare %s: %v", one.Name, err)
		}
	}
	f.node.daemons.SetAway(false)
	if diff := cmp.Diff([]string{"d"}, f.names()); diff != "" || len(f.node.instances(t)) != 1 || len(f.node.runningDaemons(t)) != 1 {
		t.Errorf("partitions %v, daemons %v, claims with a record (-want +got):\n%s", f.node.instances(t), f.node.runningDaemons(t), diff)
	}
	mustMend(t, f)                                    // leaves alone what the kubelet is to unprepare
	if err := f.Recover(testContext(t)); err != nil { // so does what the arrival of a driver does
		t.Error(err)
	}
	checkSpecs(t, f)
	mustPrepare(t, f, d) // is wanted again
	mustPrepare(t, f, c)
	mustUnprepare(t, f, d)
	checkHeld(t, f, "c")
	mustUnprepare(t, f, c)
	checkHeld(t, f)
}
