package prepare_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/files/filestest"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
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
	for _, together := range []string{"cdi.removed", "unprepare.removed", "unprepare.left"} {
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
	f := start(t, newNode(t, 1), "boot-1", func(step string) {
		if step == "unprepare.unmarked" && releasing.Load() { // b's
			close(bLeaving)
			<-aGone
		}
	})
	mustPrepare(t, f, a)
	f.node.Working = func(context.Context, gpu.Partition) error {
		if releasing.Swap(true) {
			return nil
		}
		mustPrepare(t, f, b)
		go func() { bGone <- f.Unprepare(testContext(t), named(b)) }()
		<-bLeaving
		return nil
	}
	mustUnprepare(t, f, a)
	if len(f.node.Instances()) != 1 || len(f.node.Daemons()) != 1 {
		t.Errorf("partitions %v, daemons %v, want those of b", f.node.Instances(), f.node.Daemons())
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
	node.Journal = disk.Dir
	aReleasing, bRecorded, aReleased, aGone := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan error, 1)
	var released sync.Once
	f := start(t, node, "boot-1", func(step string) {
		if step == "unprepare.released" {
			released.Do(func() { close(aReleased) })
		}
	})
	mustPrepare(t, f, a)
	var releasing sync.Once
	f.node.Working = func(context.Context, gpu.Partition) error {
		releasing.Do(func() {
			close(aReleasing)
			<-bRecorded
		})
		return nil
	}
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

// TestJoinFails: a first prepare is undone, a later one leaves what there was.
func TestJoinFails(t *testing.T) {
	f := newFixture(t, 1)
	c := newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 0))
	away := errors.New("the MPS supervisor isn't there: look at the DaemonSet tessera-mps")
	fail := func(_ context.Context, op string, _ holding.Record) error {
		if op == "join" {
			return away
		}
		return nil
	}
	f.sharing.Fail = fail
	if _, err := f.Prepare(testContext(t), c); !errors.Is(err, away) {
		t.Errorf("got %v, want %v", err, away)
	}
	checkHeld(t, f)
	f.sharing.Fail = nil
	mustPrepare(t, f, c)
	f.sharing.Fail = fail
	if _, err := f.Prepare(testContext(t), c); !errors.Is(err, away) {
		t.Errorf("again: got %v, want %v", err, away)
	}
	checkHeld(t, f, "c")
}

// TestNotAsItWas: a GPU that isn't as it was before others shared it isn't
// prepared as a whole for any claim; running daemons stay.
func TestNotAsItWas(t *testing.T) {
	f := newFixture(t, 2)
	c, p := newClaim("c", result("gpu", 0)), newClaim("p", part("p", 1, "3g.40gb", 4))
	exclusive := errors.New("its compute mode can't be put back")
	f.sharing.Fail = func(context.Context, string, holding.Record) error { return exclusive }
	if _, err := f.Prepare(testContext(t), c); !errors.Is(err, exclusive) {
		t.Errorf("got %v, want %v", err, exclusive)
	}
	mustPrepare(t, f, p)
	mustPrepare(t, f, newClaim("look", adminResult("gpu", 0)))
	checkHeld(t, f, "look", "p")
	f.sharing.Fail = nil
	mustPrepare(t, f, c)
	checkHeld(t, f, "c", "look", "p")
	f.sharing.Fail = func(context.Context, string, holding.Record) error { return exclusive }
	mustUnprepare(t, f, c)
}

// TestLeaveFails: the record stays, and the partition, until the next try.
func TestLeaveFails(t *testing.T) {
	f := newFixture(t, 1)
	c, d := newClaim("c", shareOf("s", 0, "3g.40gb", 0, 2, 0)), newClaim("d", shareOf("s", 0, "3g.40gb", 0, 2, 1))
	mustPrepare(t, f, c)
	mustPrepare(t, f, d)
	away := errors.New("the MPS supervisor isn't there")
	f.sharing.Fail = func(context.Context, string, holding.Record) error { return away }
	for _, one := range []*resourceapi.ResourceClaim{c, d} {
		if err := f.Unprepare(testContext(t), named(one)); !errors.Is(err, away) {
			t.Errorf("got %v, want %v", err, away)
		}
	}
	if len(f.journal.Claims()) != 2 || len(f.node.Instances()) != 1 || len(f.node.Daemons()) != 1 {
		t.Errorf("%d records, partitions %v, daemons %v", len(f.journal.Claims()), f.node.Instances(), f.node.Daemons())
	}
	mustMend(t, f) // leaves alone what the kubelet is to unprepare
	f.sharing.Fail = nil
	if err := f.Recover(testContext(t)); err != nil { // so does what the arrival of a driver does
		t.Error(err)
	}
	if specs, err := f.node.Claims(); err != nil || len(specs) > 0 {
		t.Errorf("specs %v, %v: claims on their way out have one again", specs, err)
	}
	mustPrepare(t, f, c) // is wanted again
	mustUnprepare(t, f, d)
	checkHeld(t, f, "c")
	mustUnprepare(t, f, c)
	checkHeld(t, f)
}
