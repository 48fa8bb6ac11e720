package cluster

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestKubernetesProgramsAreEqual checks that main.go, of which each version's module
// needs its own, was changed in all of them.
func TestKubernetesProgramsAreEqual(t *testing.T) {
	files, err := filepath.Glob("kubernetes/*/main.go")
	if err != nil || len(files) < 2 {
		t.Fatalf("found %v: %v", files, err)
	}
	first, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files[1:] {
		if other, err := os.ReadFile(file); err != nil || !bytes.Equal(first, other) {
			t.Errorf("%s differs from %s: copy it (%v)", file, files[0], err)
		}
	}
}
