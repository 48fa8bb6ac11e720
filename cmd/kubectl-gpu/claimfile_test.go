package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestUnknownKinds checks that unknown kinds of the group of claims are errors, because a claim
// among them would be missing from the answer, and that other kinds are ignored.
func TestUnknownKinds(t *testing.T) {
	const claim = `{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}, spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.nvidia.com}}]}}}`
	for document, want := range map[string]string{
		"{apiVersion: gpu.tessera.dev/v1alpha1, kind: SharingPolicy, metadata: {name: p}}":     "",
		"{apiVersion: v1, kind: ConfigMap, metadata: {name: m}}":                               "",
		"{apiVersion: resource.k8s.io/v1alpha3, kind: ResourceClaim, metadata: {name: older}}": `no kind "ResourceClaim" is registered for version "resource.k8s.io/v1alpha3"`,
		"{apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplates, metadata: {name: t}}":  `no kind "ResourceClaimTemplates" is registered`,
	} {
		claims, err := readClaims("-", strings.NewReader(claim+"\n---\n"+document+"\n"))
		if want == "" && (err != nil || len(claims) != 1) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %d claims, error %v, want %q", document, len(claims), err, want)
		}
	}
}

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
