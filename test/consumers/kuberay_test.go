//go:build consumers

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestKubeRay runs a Ray cluster of a head and three workers, whose image has no Ray, lets a
// worker go, takes two away, and deletes it.
func TestKubeRay(t *testing.T) {
	c := up(t, "kuberay", "8xh100-80gb")
	c.load(t, "kuberay-operator", "/manager")
	c.kustomize(t)
	c.until(t, "^1$", "get", "deployment", "kuberay-operator", "-o", "jsonpath={.status.availableReplicas}")
	const pods = "ray.io/cluster=ray"
	t.Run("run", func(t *testing.T) {
		c.apply(t, "cluster.yaml")
		c.run(t, pods, 4)
		c.until(t, "^ready$", "get", "raycluster", "ray", "-o", "jsonpath={.status.state}")
		c.claims(t, 4)
	})
	t.Run("restart", func(t *testing.T) {
		before := c.run(t, pods+",ray.io/node-type=worker", 3)
		c.kubectl(t, "delete", "pods", "-l", pods+",ray.io/node-type=worker", "--wait=true")
		c.replaced(t, pods, before)
		c.run(t, pods, 4)
		c.claims(t, 4)
	})
	t.Run("scale", func(t *testing.T) {
		c.kubectl(t, "patch", "raycluster", "ray", "--type=json", "-p", `[{"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": 1}]`)
		c.run(t, pods, 2)
		c.claims(t, 2)
	})
	t.Run("delete", func(t *testing.T) {
		c.kubectl(t, "delete", "raycluster", "ray", "--wait=true")
		c.free(t)
	})
}

// kustomize installs the operator's manifests of its module, as testdata changes them.
func (c *check) kustomize(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", c.system.name, "kustomization.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	module, err := filepath.Rel(dir, c.module(t, "")) // Kustomize takes no absolute path
	if err != nil {
		t.Fatal(err)
	}
	text = []byte(strings.ReplaceAll(string(text), "MODULE", module))
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	c.must(t, "default", c.Command(t.Context(), "kubectl", "apply", "--server-side", "-k", dir))
}
