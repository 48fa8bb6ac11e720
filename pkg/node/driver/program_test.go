package driver

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// TestOutputClosedLate checks that a program succeeds if its output is still open after it
// exits. A process that the plugin is forking can keep it open.
func TestOutputClosedLate(t *testing.T) {
	dir := t.TempDir()
	bin := filepath.Join(dir, "usr", "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bin, "nvidia-smi"), []byte("#!/bin/sh\n/bin/sleep 2 &\necho done\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	smi := SMI(driverroot.NewHost("/"), driverroot.Root{Path: dir, Library: filepath.Join(dir, "usr", "lib", "libnvidia-ml.so.1")})
	if out, err := smi(t.Context(), "--gpu-reset"); err != nil || out != "done\n" {
		t.Errorf("%q, %v", out, err)
	}
}
