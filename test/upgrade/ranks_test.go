//go:build versions

package upgrade

import (
	"testing"
	"time"

	"github.com/tessera-dra/tessera/test/stack"
)

// rankTaints prints the taints of the node, as key and effect.
var rankTaints = []string{"get", "node", node, "-o", `jsonpath={range .spec.taints[*]}{.key}:{.effect} {end}`}

// ranks upgrades to this version with ranks, and goes back while the node has their taints, which
// the earlier version may not know: they stay as they are, and stop no pod. This version removes
// them when it is installed again without ranks. Others' taints stay all the time. In the end the
// earlier version is installed, as before. No pod may have a GPU, so that the node is in the
// reserve.
func (u *upgrade) ranks(t *testing.T) {
	t.Helper()
	began := time.Now()
	const mine = "example.com/mine:PreferNoSchedule"
	u.kubectl(t, "taint", "nodes", node, "example.com/mine=kept:PreferNoSchedule")
	u.helm(t, "upgrade", "tessera", u.charts[next], "--reset-then-reuse-values", "--set", "image.tag="+next, "--set", "packing.ranks=true")
	u.until(t, "^"+mine+" (gpu.tessera.dev/rank-[1-6]:PreferNoSchedule ?){6}$", rankTaints...)
	before := u.kubectl(t, rankTaints...)

	u.helm(t, "rollback", "tessera", "1", "--force-conflicts")
	// Until its process has ended, this version's controller may lower the rank of a node in use.
	u.until(t, "^"+repository+":"+u.before+"$", "get", "pods", "-n", stack.Namespace, "-l", "app.kubernetes.io/component=controller", "-o", "jsonpath={.items[*].spec.containers[*].image}")
	life, err := u.live(t.Context(), stack.Pod("ranked", "whole", "nvidia-smi", "-L"))
	if err != nil {
		t.Fatalf("back to the earlier version with ranks: %v", err)
	}
	if after := u.kubectl(t, rankTaints...); after != before {
		t.Errorf("back to the earlier version, the taints were %q, and are %q", before, after)
	}

	u.helm(t, "upgrade", "tessera", u.charts[next], "--reset-then-reuse-values", "--set", "image.tag="+next)
	u.until(t, "^"+mine+"$", rankTaints...)
	u.kubectl(t, "taint", "nodes", node, "example.com/mine-")
	u.helm(t, "rollback", "tessera", "1", "--force-conflicts")
	t.Logf("back to the earlier version with ranks and here again without took %s; the earlier version's pod took %s", since(began), life.took.Round(100*time.Millisecond))
}
