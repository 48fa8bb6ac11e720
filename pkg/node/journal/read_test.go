package journal

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// TestRead reads while the journal is open; unreadable files are reported and
// not changed.
func TestRead(t *testing.T) {
	dir := t.TempDir()
	j, err := Open(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	claim, made := holding.Record{ClaimUID: "a", BootID: "boot"}, holding.GPURecord{GPU: "GPU-1", BootID: "boot", ModeSwitched: true}
	if err := errors.Join(j.Put(claim), j.PutGPU(made)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"b.json", "b.json.1.tmp", "c.corrupt", "gpus/GPU-2.json", "README"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]holding.Record{claim}, c.Claims); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]holding.GPURecord{made}, c.GPUs); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if len(c.Unreadable) != 2 || len(c.UnreadableGPUs) != 1 || len(c.Temporary) != 1 {
		t.Errorf("unreadable %v, GPUs %v, temporary %v", c.Unreadable, c.UnreadableGPUs, c.Temporary)
	}
	if again, err := Read(dir); err != nil || len(again.Unreadable) != 2 || len(again.Temporary) != 1 {
		t.Errorf("reading has changed what is there: %v, %v", again, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "b.json"), []byte(`{"version":9,"crc32":0}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(dir); !errors.Is(err, ErrNewerVersion) {
		t.Errorf("got %v, want ErrNewerVersion", err)
	}
	if c, err := Read(filepath.Join(dir, "missing")); err != nil || len(c.Claims) != 0 {
		t.Errorf("a directory that isn't there: got %v, %v", c, err)
	}
}
