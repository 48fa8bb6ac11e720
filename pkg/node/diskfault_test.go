package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/files/filestest"
	"github.com/tessera-dra/tessera/pkg/node/datadir"
)

// TestPreparedOnAFullDisk checks that a claim that is answered as prepared has a record,
// also if earlier calls failed while directories could not be synced: the record was
// written and removed again by then, and the journal knew neither for sure.
func TestPreparedOnAFullDisk(t *testing.T) {
	c := newComputer(t)
	p, err := c.start()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.end() }()
	claim := claimOf("a", kinds()[0].with...)
	var failed atomic.Int32 // the disk is asked by threads of its own
	c.disk.Fail(func(op filestest.Op) syscall.Errno {
		if op.Call == "fsync" && strings.HasSuffix(op.Path, "/claims") {
			failed.Add(1)
			return syscall.ENOSPC
		}
		return 0
	})
	if err := p.prepare(claim); err == nil || failed.Load() < 2 {
		t.Fatalf("got %v after %d calls, want a failed write and a failed removal", err, failed.Load())
	}
	c.disk.Fail(nil)
	if err := p.prepare(claim); err != nil {
		t.Fatal(err)
	}
	if err := p.end(); err != nil {
		t.Fatal(err)
	}
	if p, err = c.start(); err != nil {
		t.Fatal(err)
	}
	if !p.names()[claim.Name] {
		t.Error("the claim was answered, and isn't prepared after a restart")
	}
	if err := c.doctor(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestRecordsOfOneDevice starts with a record that is there again, as from a backup, after
// another claim got its device. Both claims keep what they have, the doctor says so, and
// when the pods of one are deleted, the other's partition stays.
func TestRecordsOfOneDevice(t *testing.T) {
	for _, first := range []string{"a", "b"} {
		t.Run(first+" ends first", func(t *testing.T) {
			c := newComputer(t)
			device := kinds()[0].with[0]
			claims := map[string]*resourceapi.ResourceClaim{"a": claimOf("a", device), "b": claimOf("b", device)}
			record := filepath.Join(datadir.JournalOf(c.data()), claims["a"].Name+".json")
			var data []byte
			for _, session := range []func(*onDisk) error{
				func(p *onDisk) (err error) {
					err = p.prepare(claims["a"])
					if err == nil {
						data, err = os.ReadFile(record)
					}
					return errors.Join(err, os.Remove(record))
				},
				func(p *onDisk) error {
					return errors.Join(p.prepare(claims["b"]), os.WriteFile(record, data, 0o600))
				},
				func(p *onDisk) error {
					if names := p.names(); !names["a"] || !names["b"] || p.unread() != nil {
						t.Errorf("prepared: %v, unreadable: %v", names, p.unread())
					}
					if err := c.doctor(p.ctx); err == nil || !strings.Contains(err.Error(), "two-holders") {
						t.Errorf("got %v, want the doctor to find two holders", err)
					}
					if err := p.unprepare(claims[first]); err != nil {
						t.Error(err)
					}
					delete(claims, first)
					if err := c.doctor(p.ctx); err != nil {
						t.Errorf("the other claim: %v", err)
					}
					for _, other := range claims {
						if err := errors.Join(p.prepare(other), p.unprepare(other), p.leaveHost()); err != nil {
							t.Error(err)
						}
					}
					return c.doctor(p.ctx)
				},
			} {
				p, err := c.start()
				if err == nil {
					err = session(p)
				}
				if err := errors.Join(err, p.end()); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// diskFault is a way in which the disk fails at one of its calls.
type diskFault struct {
	name  string
	errno syscall.Errno
	// hits reports whether the call can fail so.
	hits func(filestest.Op) bool
	// then reports whether a call after the first fails, too; nil is none.
	then func(filestest.Op) bool
	// late: the call has its effect nevertheless.
	late bool
	// dies: the node goes down, and up again with the contents of the disk.
	dies bool
}

func diskFaults() []diskFault {
	all := func(filestest.Op) bool { return true }
	reads := func(op filestest.Op) bool { return !op.Changes() }
	writes := func(op filestest.Op) bool { return op.Call == "write" }
	// The kernel goes on to watch a file of a FUSE file system whose unlink returned an error.
	keeps := func(op filestest.Op) bool { return op.Changes() && op.Call != "unlink" }
	grows := func(op filestest.Op) bool {
		return slices.Contains([]string{"create", "write", "mkdir", "rename", "fsync"}, op.Call)
	}
	return []diskFault{
		{name: "EIO of a write", errno: syscall.EIO, hits: filestest.Op.Changes},
		{name: "EIO after a write", errno: syscall.EIO, hits: keeps, late: true},
		{name: "EIO of a read", errno: syscall.EIO, hits: reads},
		{name: "disk full", errno: syscall.ENOSPC, hits: grows, then: grows},
		{name: "disk read-only", errno: syscall.EROFS, hits: filestest.Op.Changes, then: filestest.Op.Changes},
		{name: "torn write", errno: syscall.EIO, hits: writes, then: all, dies: true},
	}
}

// inject makes the call with the number fail, counted among those that the fault hits.
// mend ends the fault and returns the call, or false if there were fewer.
func (f diskFault) inject(d *filestest.Disk, number int) (mend func() (filestest.Op, bool)) {
	var first filestest.Op
	n, failed := 0, false // guarded by the disk's lock
	fails := func(op filestest.Op) syscall.Errno {
		switch {
		case failed && f.then != nil && f.then(op):
			return f.errno
		case failed || !f.hits(op):
			return 0
		case n < number:
			n++
			return 0
		}
		first, failed = op, true
		return f.errno
	}
	if f.late {
		d.FailLate(fails)
	} else {
		d.Fail(fails)
	}
	return func() (filestest.Op, bool) {
		d.Fail(nil)
		d.FailLate(nil)
		return first, failed
	}
}

// TestDiskFaults makes each call fail in which an operation of the plugin uses the disk, in
// each way. The kubelet tries again when the disk works, or the plugin is started again
// before: every claim that was answered as prepared is prepared, and nothing is left over.
func TestDiskFaults(t *testing.T) {
	some := changes(kinds()[:1])[2:]
	if *everything {
		some = changes(kinds())
	}
	start := func(c *computer, _ *onDisk) error {
		p, err := c.start()
		return errors.Join(err, p.end())
	}
	for _, one := range append(some, change{name: "first start", fresh: true, do: start}) {
		for _, f := range diskFaults() {
			t.Run(one.name+"/"+f.name, func(t *testing.T) {
				c, cases := newComputer(t), 0
				for number := 0; c.fail(t, one, f, number, number%2 > 0); number++ {
					if *everything && !f.dies {
						c.fail(t, one, f, number, number%2 == 0)
						cases++
					}
					cases++
				}
				t.Logf("%d cases", cases) // read by test/reliability
			})
		}
	}
}

// fail does the change while the call with the number fails, if there is one. again has the
// kubelet try again before the plugin ends.
func (c *computer) fail(t *testing.T, one change, f diskFault, number int, again bool) (hit bool) {
	t.Helper()
	p := c.before(t, one)
	mend := f.inject(c.disk, number)
	err := one.do(c, p)
	call, hit := mend()
	if !hit {
		err = errors.Join(err, p.end())
	} else {
		err = c.checkFault(t, one, f, p, err, again && !f.dies)
	}
	if err != nil {
		t.Errorf("%s fails (%t), the kubelet tries again (%t): %v", call, hit, again, err)
	}
	return hit
}

// before starts a plugin on an empty disk, and prepares the claims that the change needs.
func (c *computer) before(t *testing.T, one change) *onDisk {
	t.Helper()
	c.reboot(t)
	c.disk.Reset(nil)
	if one.fresh {
		return &onDisk{}
	}
	p, err := c.start()
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range one.before {
		if err := p.prepare(claim); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// doctorInTheEnd repeats doctor until the sharing worker has put back compute modes and time
// slices, for 30 seconds at most. It ignores temporary files, which the next start removes,
// and MIG modes, which the partitions' worker switches off after seconds.
func (c *computer) doctorInTheEnd(ctx context.Context, p *onDisk) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	var worker sync.WaitGroup
	if p.hardwareParts != nil { // otherwise the change is a start, which has ended
		p.unwatch()
		defer p.watchDaemons()
		worker.Go(func() { p.sharing.Run(ctx) })
	}
	defer worker.Wait()
	defer cancel()
	for range 300 {
		if err = c.doctor(ctx, "temporary-file", "mode-on-for-nothing"); err == nil {
			return nil
		}
		<-time.After(100 * time.Millisecond)
	}
	return err
}

// checkFault ends the plugin after a change during which the disk failed.
func (c *computer) checkFault(t *testing.T, one change, f diskFault, p *onDisk, failure error, again bool) error {
	t.Helper()
	var errs []error
	if failure != nil && (!errors.Is(failure, f.errno) || !strings.Contains(failure.Error(), c.dir)) {
		errs = append(errs, fmt.Errorf("the error has not both the cause, %w, and the path: %w", f.errno, failure))
	}
	if again {
		failure = one.do(c, p)
		errs = append(errs, failure, c.doctorInTheEnd(t.Context(), p))
	}
	must := map[string]bool{}
	for _, claim := range one.claims() {
		before, after := slices.Contains(one.before, claim), slices.Contains(one.after, claim)
		if failure == nil || before == after {
			must[claim.Name] = after
		}
	}
	errs = append(errs, p.end())
	if f.dies {
		c.reboot(t)
	}
	return errors.Join(append(errs, c.checkStart(one.claims(), must))...)
}
