package filestest_test

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/files/filestest"
)

// named returns the extreme with the name.
func named(t *testing.T, name string) filestest.Loss {
	t.Helper()
	for _, l := range filestest.Losses() {
		if l.String() == name {
			return l
		}
	}
	t.Fatalf("there is no loss of %q", name)
	return filestest.Loss{}
}

// flush syncs a file or a directory.
func flush(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, data string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestCut checks how much is left of a file that replaces another.
func TestCut(t *testing.T) {
	const before, after = "before", "afterwards"
	d := filestest.New(t, t.TempDir(), filestest.Tree{"file": {Mode: 0o600, Data: before}})
	var mu sync.Mutex
	left := map[string]map[string]map[string]string{} // by call and loss: path and data
	d.Watch(func(op filestest.Op, cut func(filestest.Loss) filestest.Tree) {
		mu.Lock()
		defer mu.Unlock()
		for _, l := range filestest.Losses() {
			files := map[string]string{}
			for path, e := range cut(l) {
				files[path] = e.Data
			}
			if left[op.String()] == nil {
				left[op.String()] = map[string]map[string]string{}
			}
			left[op.String()][l.String()] = files
		}
	})
	file, temp := filepath.Join(d.Dir, "file"), filepath.Join(d.Dir, "temp")
	write(t, temp, after)
	flush(t, temp)
	if err := os.Rename(temp, file); err != nil {
		t.Fatal(err)
	}
	flush(t, d.Dir)
	mu.Lock()
	defer mu.Unlock()
	old := map[string]string{"file": before}
	for _, tc := range []struct {
		op, loss string
		want     map[string]string
	}{
		{"write temp", "nothing", map[string]string{"file": before, "temp": after}},
		{"write temp", "everything", old},
		{"write temp", "names", old},
		{"write temp", "data", map[string]string{"file": before, "temp": ""}},
		{"write temp", "data, which are zeros", map[string]string{"file": before, "temp": string(make([]byte, len(after)))}},
		{"write temp", "half of the data", map[string]string{"file": before, "temp": after[:len(after)/2]}},
		{"fsync temp", "data", map[string]string{"file": before, "temp": after}},
		{"fsync temp", "everything", old},
		{"rename file", "nothing", map[string]string{"file": after}},
		{"rename file", "everything", old},
		{"fsync .", "everything", map[string]string{"file": after}},
	} {
		if diff := cmp.Diff(tc.want, left[tc.op][tc.loss]); diff != "" {
			t.Errorf("cut after %q, loss of %s (-want +got):\n%s", tc.op, tc.loss, diff)
		}
	}
}

// TestDirectoryThatIsNotSynced is lost with all that was synced in it.
func TestDirectoryThatIsNotSynced(t *testing.T) {
	d := filestest.New(t, t.TempDir(), nil)
	dir := filepath.Join(d.Dir, "dir")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "file"), "data")
	flush(t, filepath.Join(dir, "file"))
	flush(t, dir)
	if left := d.Cut(named(t, "everything")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	flush(t, d.Dir)
	if left := d.Cut(named(t, "everything")); left["dir/file"].Data != "data" {
		t.Errorf("left: %v", left)
	}
}

// TestFail checks that a write that fails leaves half of the data, and that other files can
// be read.
func TestFail(t *testing.T) {
	d := filestest.New(t, t.TempDir(), filestest.Tree{"dir": {Mode: os.ModeDir | 0o700}, "dir/file": {Mode: 0o600, Data: "data"}})
	path := filepath.Join(d.Dir, "dir", "new")
	for _, call := range []string{"create", "write"} {
		want := map[string]string{"write": "da"}[call]
		d.Fail(func(op filestest.Op) syscall.Errno {
			if op.Call == call {
				return syscall.ENOSPC
			}
			return 0
		})
		if err := os.WriteFile(path, []byte("data"), 0o600); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: got %v", call, err)
		}
		if got, err := os.ReadFile(path); string(got) != want || (err == nil) != (call == "write") {
			t.Errorf("after %s failed: %q, %v", call, got, err)
		}
	}
	d.Fail(nil)
	if got, err := os.ReadFile(filepath.Join(d.Dir, "dir", "file")); string(got) != "data" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}

// TestFailLate checks that a call that fails late has had its effect.
func TestFailLate(t *testing.T) {
	d := filestest.New(t, t.TempDir(), nil)
	file, renamed := filepath.Join(d.Dir, "file"), filepath.Join(d.Dir, "renamed")
	late := func(call string) {
		d.FailLate(func(op filestest.Op) syscall.Errno {
			if op.Call == call {
				return syscall.EIO
			}
			return 0
		})
	}
	for _, tc := range []struct {
		call string
		do   func() error
		path string
		want string
	}{
		{"create", func() error { return os.WriteFile(file, []byte("data"), 0o600) }, file, ""},
		{"write", func() error { return os.WriteFile(file, []byte("data"), 0o600) }, file, "data"},
		{"rename", func() error { return os.Rename(file, renamed) }, renamed, "data"},
	} {
		late(tc.call)
		if err := tc.do(); !errors.Is(err, syscall.EIO) {
			t.Errorf("%s: got %v", tc.call, err)
		}
		d.FailLate(nil)
		if got, err := os.ReadFile(tc.path); string(got) != tc.want || err != nil {
			t.Errorf("after %s failed late: %q, %v, want %q", tc.call, got, err, tc.want)
		}
	}
}
