//go:build e2e

package e2e

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// TestWithoutDRA installs the chart on a cluster where Dynamic Resource
// Allocation is off: Helm says which flags turn it on, and leaves nothing.
func TestWithoutDRA(t *testing.T) {
	if slices.Contains(cluster.Gates(*version, cluster.DRA(*dra)), dynamicResourceAllocation) {
		t.Skip("these clusters have Dynamic Resource Allocation: see TestStories")
	}
	name := *clusters + "-without"
	t.Cleanup(func() {
		if err := cluster.Down(context.Background(), name, t.Output()); err != nil {
			t.Error(err)
		}
	})
	c, err := cluster.Up(t.Context(), cluster.Options{Name: name, Kubernetes: *version, DRA: cluster.DRA(*dra), Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	chart, err := filepath.Abs("../../deployments/helm/tessera")
	if err != nil {
		t.Fatal(err)
	}
	helm := func(args ...string) (string, error) {
		out, err := c.Command(t.Context(), "helm", args...).CombinedOutput()
		return string(out), err
	}
	out, err := helm("install", "tessera", chart, "--namespace", "tessera-system", "--create-namespace", "--set", "image.repository=localhost/tessera")
	if err == nil {
		t.Fatalf("the chart was installed:\n%s", out)
	}
	t.Log(out)
	for _, flag := range []string{"--feature-gates=DynamicResourceAllocation=true", "--runtime-config=resource.k8s.io/"} {
		if !strings.Contains(out, flag) {
			t.Errorf("the error doesn't say %s", flag)
		}
	}
	if out, err = helm("list", "--namespace", "tessera-system", "--short"); err != nil || out != "" {
		t.Errorf("releases are left: %s %v", out, err)
	}
}
