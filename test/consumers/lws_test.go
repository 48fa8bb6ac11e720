//go:build consumers

package main

import (
	"maps"
	"testing"
)

// TestLeaderWorkerSet runs two groups of a leader and two workers, lets a worker go, takes one
// group away, and then the other.
func TestLeaderWorkerSet(t *testing.T) {
	c := up(t, "lws", "8xh100-80gb")
	c.load(t, "lws", "/manager")
	c.helm(t, "charts/lws", "lws-system", "--set", "image.manager.repository="+repositories+"lws,image.manager.tag="+tag+",image.manager.pullPolicy=Never")
	const pods, group = "leaderworkerset.sigs.k8s.io/name=server", "leaderworkerset.sigs.k8s.io/group-index="
	var first, second map[string]string
	t.Run("run", func(t *testing.T) {
		c.apply(t, "lws.yaml")
		c.run(t, pods, 6)
		first, second = c.run(t, pods+","+group+"0", 3), c.run(t, pods+","+group+"1", 3)
		c.claims(t, 6)
	})
	t.Run("restart", func(t *testing.T) {
		c.kubectl(t, "delete", "pod", "server-1-2", "--wait=false")
		c.replaced(t, pods+","+group+"1", second)
		c.run(t, pods, 6)
		if now := c.run(t, pods+","+group+"0", 3); !maps.Equal(first, now) {
			t.Errorf("the other group started again, too: %v, %v", first, now)
		}
		c.claims(t, 6)
	})
	t.Run("scale", func(t *testing.T) {
		c.kubectl(t, "scale", "leaderworkerset", "server", "--replicas=1")
		c.run(t, pods, 3)
		c.claims(t, 3)
	})
	t.Run("delete", func(t *testing.T) {
		c.kubectl(t, "delete", "leaderworkerset", "server", "--wait=true")
		c.free(t)
	})
}
