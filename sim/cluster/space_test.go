package cluster

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckSpace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "clusters")
	if err := checkSpace(dir, 1<<20); err != nil {
		t.Errorf("with a MiB to find: %v", err)
	}
	if err := checkSpace(dir, 1<<60); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("with an EiB to find: %v, want an error that names %s", err, dir)
	}
}
