package fits

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestUnknownKinds checks that unknown kinds of the group of claims are errors, because a claim
// among them would be missing from the answer, and that other kinds are ignored.
func TestUnknownKinds(t *testing.T) {
	const claim = "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}, " +
		"spec: {devices: {requests: [{name: r, exactly: {deviceClassName: gpu.nvidia.com}}]}}}"
	for kind, unknown := range map[string]bool{
		"apiVersion: gpu.tessera.dev/v1alpha1, kind: SharingPolicy":    false,
		"apiVersion: v1, kind: ConfigMap":                              false,
		"apiVersion: resource.k8s.io/v1alpha3, kind: ResourceClaim":    true,
		"apiVersion: resource.k8s.io/v1, kind: ResourceClaimTemplates": true,
	} {
		claims, err := readClaims("-", strings.NewReader(claim+"\n---\n{"+kind+", metadata: {name: x}}\n"))
		if failed := err != nil && strings.Contains(err.Error(), "no kind "); failed != unknown || !unknown && len(claims) != 1 {
			t.Errorf("%s: %d claims, error %v", kind, len(claims), err)
		}
	}
}

// TestQuickStart checks that fits finds the claims in a manifest that has other kinds, too.
func TestQuickStart(t *testing.T) {
	text, err := os.ReadFile("../../../docs/user/sharing.md")
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
