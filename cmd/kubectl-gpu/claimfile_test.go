package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestQuickStart checks that fits finds the claims in a manifest that has other kinds, too.
func TestQuickStart(t *testing.T) {
	text, err := os.ReadFile("../../docs/sharing.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```yaml\n")
	manifest, _, _ := strings.Cut(rest, "```")
	file := filepath.Join(t.TempDir(), "quick.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	claims, err := readClaims(file, nil)
	if err != nil || len(claims) != 1 || !strings.Contains(manifest, "kind: SharingPolicy") || !strings.Contains(manifest, "kind: Pod") {
		t.Errorf("%d claims, %v, of\n%s", len(claims), err, manifest)
	}
}
