package mps_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tessera-dra/tessera/pkg/mps"
)

// TestLeft: each daemon has a directory. A record that the supervisor has renamed is a file,
// and not a daemon.
func TestLeft(t *testing.T) {
	dir := t.TempDir()
	client, err := mps.Dial(filepath.Join(dir, "supervisor.sock"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := client.Left(); err != nil || len(got) > 0 {
		t.Errorf("without a supervisor: got %v, %v", got, err)
	}
	for _, path := range []string{"d/claim-a/daemon.json", "d/gpu-980fb007/pipe/log", "d/gpu-28933e90.corrupt", "d/gpu-28933e90.corrupt.1"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, path), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := client.Left()
	if diff := cmp.Diff([]string{"claim-a", "gpu-980fb007"}, got); diff != "" || err != nil {
		t.Errorf("got %v; -want +got:\n%s", err, diff)
	}
}
