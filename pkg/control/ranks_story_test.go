//go:build integration

package control_test

import (
	"fmt"
	stdslices "slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/test/metrics"
)

// TestRanksAreWrittenOnce: while no rank changes, a controller sends no write of any Node, also
// none that the server would refuse or that would change nothing: neither when it starts again and
// reads all of them, nor when what it watches has events.
func TestRanksAreWrittenOnce(t *testing.T) {
	stop := startController(t, "--ranks", "--ranks-pause=1ms")
	nodes := []*node{newRankedNode(t)}
	nodes[0].waitForRanks(t, 6) // the reserve is one of ten
	for range 2 {
		n := newRankedNode(t)
		n.waitForRanks(t, 4)
		nodes = append(nodes, n)
	}
	stop()
	before, objects := nodeWrites(t), versionsOfNodes(t, nodes)
	stop = startController(t, "--ranks", "--ranks-pause=1ms")
	for i := range 5 {
		for _, n := range nodes {
			patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/event":"%d"}}}`, i))
			if err := api.Patch(t.Context(), &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: n.name}}, patch); err != nil {
				t.Fatal(err)
			}
		}
	}
	// The controller reads all nodes before it writes any, and events in the order in which they
	// came: when it has written this one, it has looked at the others.
	newRankedNode(t).waitForRanks(t, 4)
	stop() // the server counts a request when it has answered it
	if diff := cmp.Diff(objects, versionsOfNodes(t, nodes)); diff != "" {
		t.Errorf("Nodes were changed (-before +after):\n%s", diff)
	}
	if got := nodeWrites(t) - before; got != 1 {
		t.Errorf("%d writes of Nodes, want 1, of the node that is new", got)
	}
}

// newRankedNode returns a ready node with eight published GPUs.
func newRankedNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t, 8)
	object := n.object(t)
	object.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if err := api.Status().Update(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	n.report(t)
	n.startPlugin(t)
	n.waitForPool(t, 8)
	return n
}

// waitForRanks waits until the Node has so many taints of ranks.
func (n *node) waitForRanks(t *testing.T, want int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s has %d taints", n.name, want), func() bool {
		got := 0
		for _, taint := range n.object(t).Spec.Taints {
			if strings.HasPrefix(taint.Key, "gpu.tessera.dev/rank-") && taint.Effect == corev1.TaintEffectPreferNoSchedule {
				got++
			}
		}
		return got == want
	})
}

func versionsOfNodes(t *testing.T, nodes []*node) map[string]string {
	t.Helper()
	out := make(map[string]string)
	for _, n := range nodes {
		out[n.name] = n.object(t).ResourceVersion
	}
	return out
}

// nodeWrites returns how many writes of Nodes, but of their status, the server has answered; it
// counts those, too, that it refused and those that changed nothing. Nodes that a test creates and
// deletes don't count.
func nodeWrites(t *testing.T) int {
	t.Helper()
	server, err := discovery.NewDiscoveryClientForConfig(serverConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	families, err := metrics.Server(t.Context(), server.RESTClient(), "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	requests := 0
	for _, m := range families["apiserver_request_total"].GetMetric() {
		write := stdslices.Contains([]string{"PUT", "PATCH", "APPLY"}, metrics.Label(m, "verb"))
		if write && metrics.Label(m, "resource") == "nodes" && metrics.Label(m, "subresource") == "" {
			requests += int(m.GetCounter().GetValue())
		}
	}
	return requests
}
