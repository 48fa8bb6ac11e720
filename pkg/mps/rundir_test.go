package mps_test

import (
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/mps"
)

// A record that the supervisor has renamed is a file, and not a daemon. One that can't
// be read leaves the daemon without devices.
func TestRemains(t *testing.T) {
	dir := t.TempDir()
	remains := mps.RunDirOf(filepath.Join(dir, "supervisor.sock")).Remains
	if got, err := remains(); err != nil || len(got) > 0 {
		t.Errorf("without a supervisor: got %v, %v", got, err)
	}
	body := `{"daemon":{"name":"claim-a","devices":["GPU-980fb007"]},"pid":7}`
	for path, text := range map[string]string{
		"d/claim-a/daemon.json":    fmt.Sprintf(`{"version":1,"crc32":%d,"body":%s}`, crc32.ChecksumIEEE([]byte(body)), body),
		"d/claim-b/daemon.json":    "{",
		"d/gpu-980fb007/pipe/log":  "",
		"d/gpu-28933e90.corrupt":   "",
		"d/gpu-28933e90.corrupt.1": "",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := remains()
	want := []mps.Daemon{{Name: "claim-a", Devices: []gpu.UUID{"GPU-980fb007"}}, {Name: "claim-b"}, {Name: "gpu-980fb007"}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("got %v; -want +got:\n%s", err, diff)
	}
}
