package node

import (
	"strings"
	"syscall"
	"testing"

	"github.com/tessera-dra/tessera/pkg/files/filestest"
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
	failed := 0
	c.disk.Fail(func(op filestest.Op) syscall.Errno {
		if op.Call == "fsync" && strings.HasSuffix(op.Path, "/claims") {
			failed++
			return syscall.ENOSPC
		}
		return 0
	})
	if err := p.prepare(claim); err == nil || failed < 2 {
		t.Fatalf("got %v after %d calls, want a failed write and a failed removal", err, failed)
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
