package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

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

// TestRecordsOfOneDevice starts with a record that an earlier version couldn't read and
// gave the device of to another claim. Both claims keep what they have, the doctor says
// so, and when the pods of one are deleted, the other's partition stays.
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
					return errors.Join(p.prepare(claims["b"]), os.WriteFile(strings.TrimSuffix(record, ".json")+".corrupt", data, 0o600))
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
