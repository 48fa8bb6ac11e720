//go:build consumers

package main

import (
	"context"
	"strings"
	"testing"
)

// TestVolcano schedules one gang of five pods on a node of eight GPUs, lets a second one wait
// as a whole, and lets it run when the first is gone.
func TestVolcano(t *testing.T) {
	c := up(t, "volcano", "8xh100-80gb")
	c.load(t, "vc-scheduler", "/vc-scheduler")
	c.load(t, "vc-controller-manager", "/vc-controller-manager")
	c.helm(t, "installer/helm/chart/volcano", "volcano-system", "--values", "testdata/volcano/values.yaml")
	const job = "volcano.sh/job-name="
	t.Run("run", func(t *testing.T) {
		c.apply(t, "job.yaml", "NAME", "first")
		c.run(t, job+"first", 5)
	})
	t.Run("gang", func(t *testing.T) {
		c.apply(t, "job.yaml", "NAME", "second")
		c.until(t, "(?i)unschedulable", "get", "podgroups.scheduling.volcano.sh", "-o", `jsonpath={.items[*].status.conditions[*].type}`)
		c.claims(t, 10)
		c.allocated(t, 5)
		if nodes := c.kubectl(t, "get", "pods", "-l", job+"second", "-o", "jsonpath={.items[*].spec.nodeName}"); nodes != "" {
			t.Errorf("pods of a gang that waits have nodes: %s", nodes)
		}
		c.kubectl(t, "delete", "jobs.batch.volcano.sh", "first", "--wait=true")
		c.run(t, job+"second", 5)
	})
	t.Run("delete", func(t *testing.T) {
		c.kubectl(t, "delete", "jobs.batch.volcano.sh", "--all", "--wait=true")
		c.free(t)
	})
}

// allocated checks how many claims have devices.
func (c *check) allocated(t *testing.T, want int) {
	t.Helper()
	c.eventually(t, "the number of claims with devices is right", func(ctx context.Context) (string, bool) {
		out, err := c.Kubectl(ctx, "get", "resourceclaims", "-o", "jsonpath={.items[*].status.allocation.devices.results[*].device}")
		return out, err == nil && len(strings.Fields(out)) == want
	})
}
