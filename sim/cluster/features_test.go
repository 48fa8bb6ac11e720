package cluster

import (
	"slices"
	"strings"
	"testing"
)

func TestGates(t *testing.T) {
	for _, test := range []struct {
		kubernetes string
		dra        DRA
		want       []string
	}{
		{"1.31", DRADefault, nil},
		{"1.31", DRAOn, []string{"DynamicResourceAllocation"}},
		{"1.31", DRAAll, []string{"DynamicResourceAllocation", "ResourceHealthStatus"}},
		{"1.33", DRADefault, []string{"DRAResourceClaimDeviceStatus"}},
		{"1.34", DRAOn, []string{"DRAAdminAccess", "DRAPrioritizedList", "DRAResourceClaimDeviceStatus", "DynamicResourceAllocation"}},
	} {
		if got := Gates(test.kubernetes, test.dra); !slices.Equal(got, test.want) {
			t.Errorf("Kubernetes %s, DRA %s: got %v, want %v", test.kubernetes, test.dra, got, test.want)
		}
	}
	if got := Gates("1.37", DRAAll); len(got) != len(draGates()) {
		t.Errorf("Kubernetes 1.37 has only %v", got)
	}
}

// TestFeatureGatesOfComponents checks that components don't get the gates that are
// already on by default in their version: they warn about gates that are locked.
func TestFeatureGatesOfComponents(t *testing.T) {
	o := Options{Kubernetes: "1.34", Kubelet: "1.33", FeatureGates: map[string]bool{"DRAAdminAccess": false}}.withDefaults()
	if got := o.featureGates(o.Kubernetes); len(got) != 1 || got["DRAAdminAccess"] {
		t.Errorf("control plane: %v", got)
	}
	if got := o.featureGates(o.Kubelet); len(got) != 2 || !got["DynamicResourceAllocation"] {
		t.Errorf("kubelet: %v", got)
	}
	if got := o.runtimeConfig(); !strings.Contains(got, "resource.k8s.io/v1beta1=true") {
		t.Errorf("kubelets of 1.33 read claims by a beta version; runtime config %q", got)
	}
	o.Kubelet = "1.34"
	if got := o.runtimeConfig(); got != "" {
		t.Errorf("Kubernetes 1.34 serves resource.k8s.io/v1 by itself; runtime config %q", got)
	}
}
