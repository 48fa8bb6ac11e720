//go:build prometheus

package monitoring

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tessera-dra/tessera/sim/cluster"
)

// load makes claims of every kind with the demo's manifests: whole GPUs, MIG partitions,
// MPS shares, time-sliced replicas. It makes them twice: the first observations of a
// histogram are in no rate. It also makes pods that can't start, and a GPU of a pod
// that needs a reset.
func (c *check) load(t *testing.T) {
	t.Helper()
	c.apply(t, "testdata/load.yaml")
	c.demo(t)
	c.has(t, "the first round", `count(group by (type) (tessera_allocation_info)) == 4`)
	c.kubectl(t, "delete", "deployments", "--all", "--wait=true")
	c.kubectl(t, "delete", "pods", "small", "large", "pair", "--wait=true")
	c.until(t, `^busy typo waiting$`, "get", "pods", "-o", "jsonpath={.items[*].metadata.name}")
	c.demo(t)

	whole := c.has(t, "a whole GPU", `group by (node, uuid) (tessera_allocation_info{type="gpu", node="node-0"})`)[0].Metric["uuid"]
	index := c.kubectl(t, "get", "gpuinventory", "node-0", "-o", `jsonpath={.status.gpus[?(@.uuid=="`+whole+`")].index}`)
	if err := c.Simulator(t.Context(), "node-0", cluster.Stdio{}, "break", index, "--xid", "95", "--recovery", "reset"); err != nil {
		t.Fatal(err)
	}
}

// demo applies the demo's manifests, and waits until their pods run.
func (c *check) demo(t *testing.T) {
	t.Helper()
	for _, folder := range []string{"deployment", "mig/mix", "mps/equal-shares", "timeslicing/replicas"} {
		files, err := filepath.Glob("../../demo/" + folder + "/*.yaml")
		if err != nil || len(files) == 0 {
			t.Fatalf("no manifests in demo/%s: %v", folder, err)
		}
		for _, file := range files {
			c.apply(t, file)
		}
	}
	c.until(t, `^(True ?){3}$`, "get", "deployments", "-o", `jsonpath={.items[*].status.conditions[?(@.type=="Available")].status}`)
	c.until(t, `^(Running ?){3}$`, "get", "pods", "small", "large", "pair", "-o", "jsonpath={.items[*].status.phase}")
}

// breakMore makes the trouble that only alerts are about: a GPU with a condition that
// doesn't block it, a file of state that can't be read, MPS daemons that don't start.
func (c *check) breakMore(t *testing.T) {
	t.Helper()
	const control = "/var/lib/tessera-simulator/driver/usr/bin/nvidia-cuda-mps-control"
	c.node(t, "node-1", "mv "+control+" "+control+".away")
	if _, err := c.Crash(t.Context(), "node-1", "nvidia-cuda-mps"); err != nil {
		t.Fatal(err)
	}
	c.node(t, "node-0", `for f in $(find /var/lib/tessera -name "*.json" ! -path "*/health/*" ! -path "*/seen/*" | head -1); do printf garbage > $f; done`)
	if _, err := c.Crash(t.Context(), "node-0", "kubelet-plugin"); err != nil {
		t.Fatal(err)
	}
}

func (c *check) apply(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Apply(t.Context(), "default", text); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}
