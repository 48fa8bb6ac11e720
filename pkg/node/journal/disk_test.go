package journal_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/files/filestest"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// newDisk returns a disk that has the files: their data by path.
func newDisk(t *testing.T, files map[string]string) *filestest.Disk {
	t.Helper()
	tree := filestest.Tree{}
	for path, data := range files {
		for dir := filepath.Dir(path); dir != "."; dir = filepath.Dir(dir) {
			tree[dir] = filestest.Entry{Mode: fs.ModeDir | 0o700}
		}
		tree[path] = filestest.Entry{Mode: 0o600, Data: data}
	}
	return filestest.New(t, t.TempDir(), tree)
}

// fails returns an error for the calls on the paths that begin with the prefix.
func fails(errno syscall.Errno, call, prefix string) func(filestest.Op) syscall.Errno {
	return func(op filestest.Op) syscall.Errno {
		if op.Call == call && strings.HasPrefix(op.Path, prefix) {
			return errno
		}
		return 0
	}
}

// TestFileThatCannotBeRead checks that an error of the disk isn't taken for an unreadable file: the
// journal isn't opened without the record, and has it when the disk works again.
func TestFileThatCannotBeRead(t *testing.T) {
	tree := map[string]string{
		"a.json": envelope(t, 1, everything("a")), "gpus/" + string(gpu0) + ".json": envelope(t, 1, made(gpu0)),
		"settings/" + string(gpu0) + ".json": envelope(t, 1, changed(gpu0)), "health/" + string(gpu0) + ".json": envelope(t, 1, holding.Health{GPU: gpu0}),
		"seen/gpus.json": envelope(t, 1, seen()),
		"b.corrupt":      "no record",
	}
	d := newDisk(t, tree)
	for path := range tree {
		for _, call := range []string{"open", "read"} {
			d.Fail(fails(syscall.EIO, call, path))
			j, err := journal.Open(d.Dir, nil)
			if err == nil {
				err = j.Close()
			}
			_, readErr := journal.Read(d.Dir)
			for _, err := range []error{err, readErr} {
				if !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), path) {
					t.Errorf("%s of %s fails: got %v, want EIO and the file's name", call, path, err)
				}
			}
		}
	}
	d.Fail(nil)
	j := open(t, d.Dir)
	if len(j.Claims().Readable()) != 1 || len(j.GPUs()) != 1 || len(j.AllSettings()) != 1 || len(j.AllHealth()) != 1 || len(j.Claims().Unreadable()) != 1 {
		t.Errorf("when the disk works again: %v, %v, %v, %v, unreadable %v", j.Claims().Readable().Records(), j.GPUs(), j.AllSettings(), j.AllHealth(), j.Claims().Unreadable())
	}
	for path := range tree {
		if _, err := os.Stat(filepath.Join(d.Dir, path)); err != nil {
			t.Error(err)
		}
	}
}

// TestRenamedFileStaysUnreadable: a renamed file isn't taken for a record, whatever it has
// in it; the devices that it names are held.
func TestRenamedFileStaysUnreadable(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "a.corrupt"), envelope(t, 1, everything("a")))
	j := open(t, dir)
	if u := j.Claims().Unreadable(); len(j.Claims().Readable()) != 0 || len(u) != 1 || u[0].Err == nil || len(j.Claims()) != 1 {
		t.Errorf("records %v, unreadable %v, held %v", j.Claims().Readable().Records(), u, j.Claims())
	}
	if c, err := journal.Read(dir); err != nil || len(c.Claims) != 0 || len(c.Unreadable) != 1 {
		t.Errorf("read: records %v, unreadable %v, %v", c.Claims, c.Unreadable, err)
	}
}

// TestRenamedRecordOfANewerVersion is of a file that must not be touched, as one with its
// own name.
func TestRenamedRecordOfANewerVersion(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "a.corrupt"), envelope(t, 2, everything("a")))
	if _, err := journal.Open(dir, nil); !errors.Is(err, journal.ErrNewerVersion) {
		t.Errorf("got %v, want ErrNewerVersion", err)
	}
}

// killAt runs the function with a journal, and kills it after the step.
func killAt(t *testing.T, dir, step string, do func(*journal.Journal)) {
	t.Helper()
	killed := false
	j, err := journal.Open(dir, failpoint.Call(func(s string) {
		if s == step {
			killed = true
			runtime.Goexit()
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		do(j)
	}()
	<-done
	if err := j.Close(); err != nil || !killed {
		t.Fatalf("killed at %s: %t, %v", step, killed, err)
	}
}

// TestKilledBeforeTheDirectoryWasSynced checks that what a journal answers after a kill
// survives a power loss, although the process that was killed hadn't synced it.
func TestKilledBeforeTheDirectoryWasSynced(t *testing.T) {
	t.Run("put", func(t *testing.T) {
		d := newDisk(t, nil)
		killAt(t, d.Dir, "journal.put.renamed", func(j *journal.Journal) { _ = j.Put(everything("a")) })
		j := open(t, d.Dir)
		if _, ok := j.Claim("a"); !ok {
			t.Fatal("the record isn't there after the kill")
		}
		if left := d.Cut(filestest.Losses()[0]); left["a.json"].Data == "" {
			t.Errorf("the record is lost; left: %v", left)
		}
	})
	t.Run("delete", func(t *testing.T) {
		d := newDisk(t, map[string]string{"a.json": envelope(t, 1, everything("a"))})
		killAt(t, d.Dir, "journal.delete.unlinked", func(j *journal.Journal) { _ = j.Delete("a") })
		if err := open(t, d.Dir).Delete("a"); err != nil {
			t.Fatal(err)
		}
		if left := d.Cut(filestest.Losses()[0]); len(left) > 0 {
			t.Errorf("the record is back; left: %v", left)
		}
	})
}

func stateOf(j *journal.Journal, uid string) holding.State {
	c, _ := j.Claim(uid)
	return c.State
}

// TestDoubtEnds checks after writes that failed that the next removal knows whether
// something may be on disk.
func TestDoubtEnds(t *testing.T) {
	for call, want := range map[string]bool{"create": false, "write": false, "rename": true} {
		t.Run(call, func(t *testing.T) {
			d := newDisk(t, nil)
			j := open(t, d.Dir)
			d.Fail(fails(syscall.EIO, call, "a.json"))
			if err := j.Put(everything("a")); !errors.Is(err, syscall.EIO) {
				t.Fatalf("put: %v", err)
			}
			if got := stateOf(j, "a") == holding.Doubtful; got != want {
				t.Errorf("doubtful after a failed %s: %t", call, got)
			}
			d.Fail(nil)
			if err := j.Delete("a"); err != nil {
				t.Fatal(err)
			}
			if stateOf(j, "a") == holding.Doubtful {
				t.Error("doubtful after the removal")
			}
		})
	}
}

// TestRenamedFileThatStays writes a record again while its renamed file can't be removed.
func TestRenamedFileThatStays(t *testing.T) {
	d := newDisk(t, map[string]string{"a.corrupt": "no record"})
	j := open(t, d.Dir)
	d.Fail(fails(syscall.EIO, "unlink", "a.corrupt"))
	if err := j.Put(everything("a")); !errors.Is(err, syscall.EIO) {
		t.Errorf("put: %v", err)
	}
	d.Fail(nil)
	if stateOf(j, "a") != holding.Doubtful {
		t.Error("not to be written again")
	}
	put(t, j, everything("a"))
	if stateOf(j, "a") != holding.Recorded {
		t.Error("still doubtful or unreadable")
	}
}

// TestTemporaryFileOfABrokenDisk stays until the next start: neither the write nor the
// removal succeeds.
func TestTemporaryFileOfABrokenDisk(t *testing.T) {
	d := newDisk(t, nil)
	j := open(t, d.Dir)
	d.Fail(func(op filestest.Op) syscall.Errno {
		if op.Call == "write" || op.Call == "unlink" {
			return syscall.EROFS
		}
		return 0
	})
	if err := j.Put(everything("a")); !errors.Is(err, syscall.EROFS) {
		t.Errorf("put: %v", err)
	}
	d.Fail(nil)
	put(t, j, everything("a"))
	if got := files(t, d.Dir); len(got) != 2 {
		t.Errorf("files: %v, want the record and the temporary file", got)
	}
	reopen(t, j, d.Dir)
	if diff := cmp.Diff([]string{"a.json"}, files(t, d.Dir)); diff != "" {
		t.Errorf("files after a start (-want +got):\n%s", diff)
	}
}

// TestRecordThatMayBeOnDiskIsHeld has a rename fail that the disk has done: the next start
// would find the record, so no other claim may get its devices.
func TestRecordThatMayBeOnDiskIsHeld(t *testing.T) {
	d := newDisk(t, nil)
	j := open(t, d.Dir)
	d.FailLate(fails(syscall.EIO, "rename", "a.json"))
	if err := j.Put(everything("a")); !errors.Is(err, syscall.EIO) {
		t.Errorf("put: %v", err)
	}
	d.FailLate(nil)
	if c, err := journal.Read(d.Dir); len(c.Claims) != 1 || err != nil {
		t.Fatalf("on the disk: %v, %v, want the record", c.Claims, err)
	}
	if holders := j.Claims().Holders(gpu.Whole{GPU: gpu0}, "b"); len(holders) != 1 || holders[0].State != holding.Doubtful {
		t.Errorf("holders: %v, want the claim, doubtful", holders)
	}
	if err := j.Delete("a"); err != nil {
		t.Fatal(err)
	}
	if held := j.Claims(); len(held) > 0 || len(files(t, d.Dir)) > 0 {
		t.Errorf("after the removal: held %v, files %v", held, files(t, d.Dir))
	}
}

// TestRecordInPlaceOfAnUnreadableOne that may not be on disk: what it says counts.
func TestRecordInPlaceOfAnUnreadableOne(t *testing.T) {
	d := newDisk(t, map[string]string{"a.corrupt": "no record"})
	j := open(t, d.Dir)
	d.FailLate(fails(syscall.EIO, "rename", "a.json"))
	if err := j.Put(everything("a")); !errors.Is(err, syscall.EIO) {
		t.Errorf("put: %v", err)
	}
	want := holding.Claims{{Record: everything("a"), State: holding.Doubtful}}
	if diff := cmp.Diff(want, j.Claims()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
