package journal_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

const (
	gpu0 = gpu.UUID("GPU-980fb007-8a10-0135-bada-13f71feaef21")
	gpu1 = gpu.UUID("GPU-11111111-8a10-0135-bada-13f71feaef21")
)

// everything has each field set.
func everything(uid string) holding.Record {
	return holding.Record{
		ClaimUID: uid, Namespace: "default", Name: "training", BootID: "51f9f1a9-3c3c-4a93-8b2c-0a42e7bb1a5e",
		Holdings: []holding.Holding{
			{Device: "gpu-980fb007", GPU: gpu0, Request: "main/big"},
			{Device: "gpu-11111111", GPU: gpu1, Request: "look", Admin: true, ShareID: "share"},
		},
	}
}

func open(t testing.TB, dir string) *journal.Journal {
	t.Helper()
	j, err := journal.Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func reopen(t testing.TB, j *journal.Journal, dir string) *journal.Journal {
	t.Helper()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	return open(t, dir)
}

func files(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func put(t testing.TB, j *journal.Journal, r holding.Record) {
	t.Helper()
	if err := j.Put(r); err != nil {
		t.Fatal(err)
	}
}

func writeFile(t testing.TB, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRecordsSurviveAReopen(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	put(t, j, everything("a"))
	put(t, j, everything("b"))
	changed := everything("a")
	changed.BootID = "another"
	put(t, j, changed)
	if err := j.Delete("b"); err != nil {
		t.Fatal(err)
	}
	if err := j.Delete("never-there"); err != nil {
		t.Errorf("deleting what isn't there: %v", err)
	}
	want := []holding.Record{changed}
	if diff := cmp.Diff(want, j.Claims().Readable().Records()); diff != "" {
		t.Errorf("in memory (-want +got):\n%s", diff)
	}
	j = reopen(t, j, dir)
	if diff := cmp.Diff(want, j.Claims().Readable().Records()); diff != "" {
		t.Errorf("after a reopen (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a.json"}, files(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// TestOldFormats keeps the files of every released format readable.
func TestOldFormats(t *testing.T) {
	const uid = "c8f3b5c2-5f0e-4a55-9a55-0d3f7a1b2c3d"
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "v1"))); err != nil {
		t.Fatal(err)
	}
	j := open(t, dir)
	want := everything(uid)
	// Fields that a later release adds to a record must not stop this one.
	later := want
	later.ClaimUID = "0b6f8f0e-3d2a-4f5d-8a77-b7e1a7c60b11"
	if diff := cmp.Diff([]holding.Record{later, want}, j.Claims().Readable().Records()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := j.Claims().Unreadable(); len(got) > 0 {
		t.Errorf("unreadable: %v", got)
	}
}

// envelope writes a file as another version of the plugin would.
func envelope(t testing.TB, version int, body any) string {
	t.Helper()
	b, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`{"version":%d,"crc32":%d,"body":%s}`, version, crc32.ChecksumIEEE(b), b)
}

func TestUnreadableFileIsRenamedAndNamesWhatItCan(t *testing.T) {
	whole := envelope(t, 1, everything("bad"))
	for name, tc := range map[string]struct {
		content string
		want    holding.Record
	}{
		"empty":                  {"", holding.Record{ClaimUID: "bad"}},
		"zeros":                  {strings.Repeat("\x00", 500), holding.Record{ClaimUID: "bad"}},
		"checksum":               {strings.Replace(whole, "main/big", "main/bug", 1), withRequest(everything("bad"), "main/bug")},
		"cut off after a device": {cutBefore(t, whole, `,{"device"`), withoutLast(everything("bad"))},
		"another claim's":        {envelope(t, 1, everything("other")), withoutShare(everything("bad"))},
		"newer, but unreadable":  {strings.Replace(envelope(t, 9, everything("bad")), "main/big", "main/bug", 1), withRequest(everything("bad"), "main/bug")},
		"no format":              {envelope(t, 0, everything("bad")), withoutShare(everything("bad"))},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeFile(t, filepath.Join(dir, "bad.json"), tc.content)
			j := open(t, dir)
			put(t, j, everything("good"))
			j = reopen(t, j, dir) // the renamed files are still known
			unreadable := j.Claims().Unreadable()
			if len(unreadable) != 1 || unreadable[0].Err == nil {
				t.Fatalf("unreadable: got %v, want one with an error", unreadable)
			}
			if diff := cmp.Diff(tc.want, unreadable[0].Record); diff != "" {
				t.Errorf("made out (-want +got):\n%s", diff)
			}
			if got, err := os.ReadFile(unreadable[0].File); err != nil || string(got) != tc.content {
				t.Errorf("renamed file: got %q, %v, want it unchanged", got, err)
			}
			if diff := cmp.Diff([]holding.Record{everything("good")}, j.Claims().Readable().Records()); diff != "" {
				t.Errorf("the other record (-want +got):\n%s", diff)
			}
		})
	}
}

func cutBefore(t *testing.T, s, mark string) string {
	before, _, found := strings.Cut(s, mark)
	if !found {
		t.Fatalf("no %s in %s", mark, s)
	}
	return before
}

func withRequest(r holding.Record, request string) holding.Record {
	r = withoutShare(r)
	r.Holdings[0].Request = request
	return r
}

func withoutShare(r holding.Record) holding.Record {
	r.Holdings[1].ShareID = ""
	return r
}

func withoutLast(r holding.Record) holding.Record {
	r.Holdings = r.Holdings[:1]
	return r
}

func TestUnreadableClaimHoldsUntilItIsSettled(t *testing.T) {
	for name, settle := range map[string]func(*journal.Journal) error{
		"prepared again": func(j *journal.Journal) error { return j.Put(everything("bad")) },
		"unprepared":     func(j *journal.Journal) error { return j.Delete("bad") },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			unreadable := strings.Replace(envelope(t, 1, everything("bad")), "main/big", "main/bug", 1)
			writeFile(t, filepath.Join(dir, "bad.json"), unreadable)
			j := open(t, dir)
			if got := j.Claims().Holders(gpu.Whole{GPU: gpu0}, "new"); len(got) != 1 || got[0].ClaimUID != "bad" {
				t.Errorf("holders before: got %v, want the unreadable claim", got)
			}
			if err := settle(j); err != nil {
				t.Fatal(err)
			}
			j = reopen(t, j, dir)
			if got := j.Claims().Unreadable(); len(got) > 0 {
				t.Errorf("unreadable after: %v", got)
			}
			if got := files(t, dir); slices.Contains(got, "bad.corrupt") {
				t.Errorf("files after: %v", got)
			}
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Run("a newer version's file, which stays", func(t *testing.T) {
		dir := t.TempDir()
		writeFile(t, filepath.Join(dir, "a.json"), envelope(t, 2, everything("a")))
		_, err := journal.Open(dir, nil)
		if !errors.Is(err, journal.ErrNewerVersion) || !strings.Contains(err.Error(), "a.json") {
			t.Errorf("got %v, want ErrNewerVersion naming the file", err)
		}
		if diff := cmp.Diff([]string{"a.json"}, files(t, dir)); diff != "" {
			t.Errorf("files (-want +got):\n%s", diff)
		}
	})
	t.Run("a journal in use", func(t *testing.T) {
		dir := t.TempDir()
		open(t, dir)
		if _, err := journal.Open(dir, nil); err == nil {
			t.Error("opened twice")
		}
	})
}

func TestTemporaryFilesAreRemovedAndForeignOnesLeft(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "a.json.123.tmp"), "half")
	writeFile(t, filepath.Join(dir, "README"), "hello")
	open(t, dir)
	if diff := cmp.Diff([]string{"README"}, files(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestPutRefusesWhatCannotNameAFile(t *testing.T) {
	j := open(t, t.TempDir())
	for _, uid := range []string{"", "..", "a/b", ".hidden", strings.Repeat("x", 200)} {
		if err := j.Put(everything(uid)); err == nil {
			t.Errorf("%q accepted", uid)
		}
	}
}

func TestRemovedDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "claims")
	j := open(t, dir)
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := j.Put(everything("a")); err == nil || !strings.Contains(err.Error(), "restart") {
		t.Errorf("put: got %v, want an error that says to restart the plugin", err)
	}
}

// TestFullDisk runs on a small tmpfs, so it needs root.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatalf("mount a small tmpfs (run the tests as root): %v", err)
	}
	j := open(t, dir)
	t.Cleanup(func() {
		j.Close()
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	put(t, j, everything("a"))
	fill := filepath.Join(dir, "fill")
	if err := os.WriteFile(fill, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("filling the disk: got %v, want ENOSPC", err)
	}
	changed := everything("a")
	changed.BootID = "another"
	for _, r := range []holding.Record{changed, everything("b")} {
		if err := j.Put(r); !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "free some space") {
			t.Errorf("put: got %v, want ENOSPC and what to do", err)
		}
	}
	if diff := cmp.Diff([]holding.Record{everything("a")}, j.Claims().Readable().Records()); diff != "" {
		t.Errorf("in memory (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a.json", "fill"}, files(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	put(t, j, changed)
	if err := j.Delete("a"); err != nil {
		t.Error(err)
	}
}

// TestPutIsAllOrNothing looks at the directory as a crash after each step
// would leave it.
func TestPutIsAllOrNothing(t *testing.T) {
	dir, old := t.TempDir(), everything("a")
	changed := old
	changed.BootID = "another"
	first := open(t, dir)
	put(t, first, old)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	var steps []string
	j, err := journal.Open(dir, failpoint.Call(func(step string) {
		steps = append(steps, step)
		snapshot := filepath.Join(t.TempDir(), "snapshot")
		if err := os.CopyFS(snapshot, os.DirFS(dir)); err != nil {
			t.Error(err)
		}
		after := open(t, snapshot)
		got, _ := after.Claim("a")
		if len(after.Claims().Unreadable()) > 0 || (!cmp.Equal(got.Record, old) && !cmp.Equal(got.Record, changed)) {
			t.Errorf("after %s: got %v and unreadable %v", step, got, after.Claims().Unreadable())
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	put(t, j, changed)
	want := []string{"journal.put.created", "journal.put.written", "journal.put.synced", "journal.put.renamed", "journal.put.durable"}
	if diff := cmp.Diff(want, steps); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
}

func TestManyClaimsAtOnce(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			uid := fmt.Sprintf("claim-%d", i)
			for range 20 {
				if err := errors.Join(j.Put(everything(uid)), j.Delete(uid)); err != nil {
					t.Error(err)
				}
				j.Claims()
			}
		})
	}
	wg.Wait()
	if got := files(t, dir); len(got) > 0 || len(j.Claims().Readable()) > 0 {
		t.Errorf("left over: %v", got)
	}
}
