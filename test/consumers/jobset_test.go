//go:build consumers

package main

import "testing"

// TestJobSet runs a JobSet of a driver and two jobs of two workers, lets one pod fail, and
// deletes it.
func TestJobSet(t *testing.T) {
	c := up(t, "jobset", "8xh100-80gb")
	c.load(t, "jobset", "/manager")
	c.helm(t, "charts/jobset", "jobset-system", "--set", "image.repository="+repositories+"jobset,image.tag="+tag+",image.pullPolicy=Never")
	const pods = "jobset.sigs.k8s.io/jobset-name=training"
	var before map[string]string
	t.Run("run", func(t *testing.T) {
		c.apply(t, "jobset.yaml")
		before = c.run(t, pods, 5)
		c.claims(t, 5)
	})
	t.Run("restart", func(t *testing.T) {
		name := c.kubectl(t, "get", "pods", "-l", pods+",jobset.sigs.k8s.io/replicatedjob-name=workers", "-o", "jsonpath={.items[0].metadata.name}")
		c.kubectl(t, "exec", name, "--", "touch", "/tmp/fail")
		c.until(t, "^1$", "get", "jobset", "training", "-o", "jsonpath={.status.restarts}")
		c.replaced(t, pods, before)
		c.run(t, pods, 5)
		c.claims(t, 5)
	})
	t.Run("delete", func(t *testing.T) {
		c.kubectl(t, "delete", "jobset", "training", "--wait=true")
		c.free(t)
	})
}
