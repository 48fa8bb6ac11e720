package node

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// A record that the supervisor has put aside is a file, and no daemon.
func TestMPSRemains(t *testing.T) {
	dir := t.TempDir()
	remains := mpsRemains(filepath.Join(dir, "supervisor.sock"))
	if got, err := remains(); err != nil || len(got) > 0 {
		t.Errorf("without a supervisor: got %v, %v", got, err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "d/gpu-980fb007"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "d/gpu-28933e90.corrupt"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := remains(); err != nil || !slices.Equal(got, []string{"gpu-980fb007"}) {
		t.Errorf("got %v, %v", got, err)
	}
}
