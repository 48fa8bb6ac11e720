package journal_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// made has each field set.
func made(uuid gpu.UUID) holding.GPURecord {
	return holding.GPURecord{
		GPU: uuid, BootID: "51f9f1a9-3c3c-4a93-8b2c-0a42e7bb1a5e", ModeSwitched: true,
		Partitions: []holding.MadePartition{
			{
				Partition: holding.Partition{Profile: "1g.18gb+me", Start: 6, Size: 1},
				Made:      &holding.MadeInstance{GPUInstanceID: 13, ComputeInstanceID: 0, UUID: "MIG-1d0b5bfa-1b0e-5c0f-9a53-b5f31ed1f4b7"},
			},
			{
				Partition: holding.Partition{Profile: "1g.18gb", Start: 4, Size: 1},
				Made:      &holding.MadeInstance{GPUInstanceID: 11, ComputeInstanceID: gpu.NoComputeInstance},
			},
			{Partition: holding.Partition{Profile: "3g.71gb", Start: 0, Size: 4}},
		},
	}
}

func putGPU(t testing.TB, j *journal.Journal, r holding.GPURecord) {
	t.Helper()
	if err := j.PutGPU(r); err != nil {
		t.Fatal(err)
	}
}

func TestGPURecordsSurviveAReopen(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	put(t, j, everything("a"))
	putGPU(t, j, made(gpu0))
	putGPU(t, j, made(gpu1))
	changed := made(gpu1)
	changed.Partitions = changed.Partitions[:1]
	putGPU(t, j, changed)
	for _, uuid := range []gpu.UUID{gpu0, "GPU-never-there"} {
		if err := j.DeleteGPU(uuid); err != nil {
			t.Error(err)
		}
	}
	for _, j := range []*journal.Journal{j, reopen(t, j, dir)} {
		if diff := cmp.Diff([]holding.GPURecord{changed}, j.GPUs()); diff != "" {
			t.Errorf("GPUs (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]holding.Record{everything("a")}, j.Claims().Readable().Records()); diff != "" {
			t.Errorf("claims (-want +got):\n%s", diff)
		}
		if got, ok := j.GPU(gpu0); ok {
			t.Errorf("record of a GPU that was deleted: %v", got)
		}
	}
	if diff := cmp.Diff([]string{string(gpu1) + ".json"}, files(t, filepath.Join(dir, "gpus"))); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestOldFormatsOfGPURecords(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "v1"))); err != nil {
		t.Fatal(err)
	}
	j := open(t, dir)
	if diff := cmp.Diff([]holding.GPURecord{made(gpu1), made(gpu0)}, j.GPUs()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := j.UnreadableGPUs(); len(got) > 0 {
		t.Errorf("unreadable: %v", got)
	}
}

func TestUnreadableGPURecordIsRenamedUntilReplaced(t *testing.T) {
	unreadable := strings.Replace(envelope(t, 1, made(gpu0)), "3g.71gb", "4g.71gb", 1)
	for name, settle := range map[string]func(*journal.Journal) error{
		"written again": func(j *journal.Journal) error { return j.PutGPU(made(gpu0)) },
		"deleted":       func(j *journal.Journal) error { return j.DeleteGPU(gpu0) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "gpus", string(gpu0))
			if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			writeFile(t, path+".json", unreadable)
			writeFile(t, path+".json.1.tmp", "half")
			j := open(t, dir)
			putGPU(t, j, made(gpu1))
			j = reopen(t, j, dir) // the renamed files are still known
			if got := j.UnreadableGPUs(); len(got) != 1 || got[0].GPU != gpu0 || got[0].Err == nil || got[0].Path != path+".corrupt" {
				t.Fatalf("unreadable: got %v, want the one", got)
			}
			if diff := cmp.Diff([]holding.GPURecord{made(gpu1)}, j.GPUs()); diff != "" {
				t.Errorf("the other record (-want +got):\n%s", diff)
			}
			if err := settle(j); err != nil {
				t.Fatal(err)
			}
			j = reopen(t, j, dir)
			if got := j.UnreadableGPUs(); len(got) > 0 {
				t.Errorf("unreadable after: %v", got)
			}
		})
	}
}

// TestTornGPURecordIsDropped as a crash of the machine leaves one: its
// partitions are gone too. A claim's record, which is synced, is never taken
// for one.
func TestTornGPURecordIsDropped(t *testing.T) {
	for name, content := range map[string]string{"empty": "", "holes": strings.Repeat("\x00", 500)} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			putGPU(t, open(t, dir), made(gpu1))
			copied := filepath.Join(t.TempDir(), "journal")
			writeFile(t, filepath.Join(dir, "gpus", string(gpu0)+".json"), content)
			writeFile(t, filepath.Join(dir, "claim.json"), content)
			if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			j := open(t, copied)
			if got := j.UnreadableGPUs(); len(got) > 0 {
				t.Errorf("unreadable GPUs: %v", got)
			}
			if got := j.Claims().Unreadable(); len(got) != 1 {
				t.Errorf("unreadable claims: got %v, want 1", got)
			}
			if diff := cmp.Diff([]string{string(gpu1) + ".json"}, files(t, filepath.Join(copied, "gpus"))); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOpenRefusesANewerGPURecord(t *testing.T) {
	dir := t.TempDir()
	putGPU(t, open(t, dir), made(gpu1))
	writeFile(t, filepath.Join(dir, "gpus", string(gpu0)+".json"), envelope(t, 2, made(gpu0)))
	copied := filepath.Join(t.TempDir(), "journal")
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if _, err := journal.Open(copied, nil); !errors.Is(err, journal.ErrNewerVersion) || !strings.Contains(err.Error(), string(gpu0)) {
		t.Errorf("got %v, want ErrNewerVersion naming the file", err)
	}
}

func TestPutGPURefusesWhatCannotNameAFile(t *testing.T) {
	j := open(t, t.TempDir())
	for _, uuid := range []gpu.UUID{"", "..", "a/b"} {
		if err := j.PutGPU(made(uuid)); err == nil {
			t.Errorf("%q accepted", uuid)
		}
	}
}

// TestPutGPUIsAllOrNothing looks at the directory as a crash after each step
// would leave it; the first record's directory is made with it.
func TestPutGPUIsAllOrNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	want := made(gpu0)
	var steps []string
	j, err := journal.Open(dir, failpoint.Call(func(step string) {
		steps = append(steps, step)
		snapshot := filepath.Join(t.TempDir(), "snapshot")
		if err := os.CopyFS(snapshot, os.DirFS(dir)); err != nil {
			t.Error(err)
		}
		after := open(t, snapshot)
		got, there := after.GPU(gpu0)
		if len(after.UnreadableGPUs()) > 0 || (there && !cmp.Equal(got, want)) {
			t.Errorf("after %s: got %v and unreadable %v", step, got, after.UnreadableGPUs())
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	putGPU(t, j, want)
	if err := j.DeleteGPU(gpu0); err != nil {
		t.Error(err)
	}
	wantSteps := []string{
		"journal.gpu.put.created", "journal.gpu.put.written", "journal.gpu.put.synced", "journal.gpu.put.renamed", "journal.gpu.put.durable",
		"journal.gpu.delete.unlinked", "journal.gpu.delete.durable",
	}
	if diff := cmp.Diff(wantSteps, steps); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
}
