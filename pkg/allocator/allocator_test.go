package allocator_test

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/allocator"
)

func TestChargesShared(t *testing.T) {
	for v, want := range map[string]bool{
		"v1.33.9": false, "v1.34.0": false, "v1.34.13": false, "v1.35.0": false, "v1.35.10": false,
		"v1.36.0": false, "v1.36.1": false, "v1.36.2": true, "v1.36.7": true, "v1.37.0": true, "v1.37.1": true, "v1.38.0": true, "v2.0.0": true,
		// Pre-releases.
		"v1.36.2-rc.0": false, "v1.36.2-rc.0.14+0123456789abcd": false, "v1.36.3-rc.0": true,
		"v1.37.0-alpha.0": false, "v1.37.0-beta.1": false, "v1.37.0-rc.1": false, "v1.37.1-rc.0": true, "v1.38.0-alpha.1": true,
		// Vendors' builds.
		"v1.36.1+k3s1": false, "v1.36.2+k3s1": true, "v1.36.2-gke.1000": false, "v1.36.3-gke.1000": true, "v1.36.1-eks-0a1b2c3": false,
		"v1.37.0-gke.1": true, "1.36.2": true,
		// No version.
		"": false, "unknown": false, "v1": false, "v1.37": false, "v0.0.0-master+$Format:%H$": false,
	} {
		if got := allocator.ChargesShared(v); got != want {
			t.Errorf("%q: got %v, want %v", v, got, want)
		}
	}
}

func TestCountsCapacity(t *testing.T) {
	for v, want := range map[string]bool{
		"v1.31.4": true, "v1.33.13": true, "v1.34.0": false, "v1.34.13": false, "v1.34.4-gke.1000": false, "v1.35.0": false, "v1.35.4+k3s1": false, "v1.36.0-alpha.1": true, "v1.36.1": true,
		// No version: it may be one of those.
		"": false, "unknown": false,
	} {
		if got := allocator.CountsCapacity(v); got != want {
			t.Errorf("%q: got %v, want %v", v, got, want)
		}
	}
}

func TestHeedsEffectNone(t *testing.T) {
	for v, want := range map[string]bool{
		"v1.34.13": false, "v1.35.0": false, "v1.35.4+k3s1": false, "v1.36.0": true, "v1.36.0-rc.1": true, "v1.37.1": true, "v2.0.0": true, "": false, "unknown": false,
	} {
		if got := allocator.HeedsEffectNone(v); got != want {
			t.Errorf("%q: got %v, want %v", v, got, want)
		}
	}
}

func TestExplainCapacity(t *testing.T) {
	for version, want := range map[string]string{
		"v1.35.2": "beside an API server of Kubernetes v1.35.2", "": `version, "", doesn't say`, "unknown": `version, "unknown", doesn't say`,
	} {
		if got := allocator.ExplainCapacity(version); !strings.Contains(got, want) {
			t.Errorf("%q: %s", version, got)
		}
	}
}

func TestExplain(t *testing.T) {
	for version, names := range map[string]string{"v1.36.1": "v1.36.1", "": "an unknown version"} {
		if got := allocator.Explain(version); !strings.Contains(got, names) || !strings.Contains(got, "kubernetes/kubernetes#139034") || !strings.Contains(got, "1.36.2") {
			t.Errorf("%q: %s", version, got)
		}
	}
}
