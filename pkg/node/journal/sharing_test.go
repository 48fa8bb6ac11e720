package journal_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// sharing has each field that shares, replicas and configurations set.
func sharing(uid string) holding.Record {
	return holding.Record{
		ClaimUID: uid, Namespace: "default", Name: "inference", BootID: "51f9f1a9-3c3c-4a93-8b2c-0a42e7bb1a5e",
		Holdings: []holding.Holding{
			{Device: "gpu-980fb007-mps4-2", GPU: gpu0, Request: "a", Share: &holding.Part{Count: 4, Number: 2}, MPS: &holding.MPS{ThreadPercentage: 25, MemoryMiB: 35756}},
			{
				Device: "gpu-980fb007-mig-3g71gb-0-mps", GPU: gpu0, Request: "b", Partition: holding.Partition{Profile: "3g.71gb", Size: 4},
				Share: &holding.Part{}, MPS: &holding.MPS{MemoryMiB: 1024}, ShareID: "5f0e4a55-9a55-4d3f-8a1b-2c3d4e5f6071",
			},
			{Device: "gpu-11111111-ts4-0", GPU: gpu1, Request: "c", Replica: &holding.Part{Count: 4}},
			{Device: "gpu-11111111", GPU: gpu1, Request: "d", MPS: &holding.MPS{}},
			{Device: "gpu-11111111", GPU: gpu1, Request: "e", TimeSlice: "Long"},
		},
	}
}

// changed has each field set.
func changed(uuid gpu.UUID) holding.Settings {
	return holding.Settings{GPU: uuid, BootID: "51f9f1a9-3c3c-4a93-8b2c-0a42e7bb1a5e", ComputeModeBefore: "Default", TimeSliceBefore: "Default"}
}

// TestOldFormatsOfSharing keeps records of shares, and settings, of every format
// readable; the files named later have fields that a later release may add.
func TestOldFormatsOfSharing(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "v1-sharing"))); err != nil {
		t.Fatal(err)
	}
	j := open(t, dir)
	const now, later = "9a55c8f3-5f0e-4a55-9a55-0d3f7a1b2c3d", "9a55c8f4-5f0e-4a55-9a55-0d3f7a1b2c3d"
	if diff := cmp.Diff([]holding.Record{sharing(now), sharing(later)}, j.Claims().Readable().Records()); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]holding.Settings{changed(gpu1), changed(gpu0)}, j.AllSettings()); diff != "" {
		t.Errorf("settings (-want +got):\n%s", diff)
	}
	if len(j.Claims().Unreadable()) > 0 || len(j.UnreadableSettings()) > 0 {
		t.Errorf("unreadable: %v, %v", j.Claims().Unreadable(), j.UnreadableSettings())
	}
	t.Run("what is written now", func(t *testing.T) {
		again := filepath.Join(t.TempDir(), "journal")
		j := open(t, again)
		put(t, j, sharing(now))
		if err := j.PutSettings(changed(gpu0)); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{now + ".json", "settings/" + string(gpu0) + ".json"} {
			got, err := os.ReadFile(filepath.Join(again, name))
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", "v1-sharing", name)
			if os.Getenv("UPDATE_GOLDEN") != "" {
				if err := errors.Join(os.MkdirAll(filepath.Dir(golden), 0o755), os.WriteFile(golden, got, 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s (-want +got), older releases have to read it:\n%s", name, diff)
			}
		}
	})
}

func TestSettingsSurviveAReopen(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	for _, uuid := range []gpu.UUID{gpu0, gpu1} {
		if err := j.PutSettings(changed(uuid)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(j.DeleteSettings(gpu1), j.DeleteSettings("GPU-never-there")); err != nil {
		t.Error(err)
	}
	writeFile(t, filepath.Join(dir, "settings", string(gpu1)+".json"), strings.Replace(envelope(t, 1, changed(gpu1)), "Default", "Defunct", 1))
	j = reopen(t, j, dir)
	if s, ok := j.Settings(gpu0); !ok || s != changed(gpu0) {
		t.Errorf("got %v, %v", s, ok)
	}
	if u := j.UnreadableSettings(); len(u) != 1 || u[0].GPU != gpu1 {
		t.Errorf("unreadable: got %v, want the one", u)
	}
	c, err := journal.Read(dir)
	if err != nil || len(c.Settings) != 1 || len(c.UnreadableSettings) != 1 {
		t.Errorf("read from outside: %v, %v, %v", c.Settings, c.UnreadableSettings, err)
	}
	if err := j.PutSettings(changed(gpu1)); err != nil || len(j.UnreadableSettings()) > 0 {
		t.Errorf("written again: %v, %v", err, j.UnreadableSettings())
	}
}
