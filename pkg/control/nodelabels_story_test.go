//go:build integration

package control_test

import (
	"fmt"
	"os/exec"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// object reads the Node.
func (n *node) object(t *testing.T) *corev1.Node {
	t.Helper()
	object := &corev1.Node{}
	if err := api.Get(t.Context(), types.NamespacedName{Name: n.name}, object); err != nil {
		t.Fatal(err)
	}
	return object
}

// labels returns four labels about GPUs of the Node.
func (n *node) labels(t *testing.T) string {
	t.Helper()
	l := n.object(t).Labels
	return fmt.Sprint(l["nvidia.com/gpu.present"], " ", l["nvidia.com/gpu.product"], " ", l["nvidia.com/gpu.count"], " ", l["nvidia.com/gpu.family"])
}

// mustHaveNoLabels checks that nothing is left of the controller's labels of a Node.
func (n *node) mustHaveNoLabels(t *testing.T) {
	t.Helper()
	if got := n.labels(t); got != "   " {
		t.Errorf("left over: %q", got)
	}
	for _, m := range n.object(t).ManagedFields {
		if m.Manager == "tessera-node-labels" {
			t.Errorf("left over: %+v", m)
		}
	}
}

// TestNodeLabels: a node has the labels while it has an inventory; labels of
// others stay, and the command removes the remaining ones.
func TestNodeLabels(t *testing.T) {
	stop := startController(t, "--node-labels")
	n, other := newNode(t, 2), newNode(t, 1)
	label(t, n.name, "nvidia.com/gpu.family", "mine")
	n.report(t)
	other.report(t)
	eventually(t, "the node has its labels", func() bool { return n.labels(t) == "true NVIDIA-H100-80GB-HBM3 2 mine" })
	eventually(t, "so has the other", func() bool { return other.labels(t) == "true NVIDIA-H100-80GB-HBM3 1 hopper" })
	if err := api.Delete(t.Context(), n.inventory(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its labels go with its inventory", func() bool { return n.labels(t) == "   mine" })
	stop()
	if out, err := exec.Command(program, "remove-node-labels", "--kubeconfig", kubeconfig).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	other.mustHaveNoLabels(t)
}

// TestNodeLabelsSwitchedOff: a controller without the option removes the labels that one with
// it has written, labels of others stay, and after that it writes nothing.
func TestNodeLabelsSwitchedOff(t *testing.T) {
	stop := startController(t, "--node-labels")
	n, other := newNode(t, 2), newNode(t, 1)
	label(t, n.name, "nvidia.com/gpu.family", "mine")
	n.report(t)
	other.report(t)
	eventually(t, "both nodes have their labels", func() bool {
		return n.labels(t) == "true NVIDIA-H100-80GB-HBM3 2 mine" && other.labels(t) == "true NVIDIA-H100-80GB-HBM3 1 hopper"
	})
	stop()
	stop = startController(t)
	eventually(t, "the labels are gone", func() bool { return n.labels(t) == "   mine" && other.labels(t) == "   " })
	other.mustHaveNoLabels(t)
	version := func() string { return n.object(t).ResourceVersion + " " + other.object(t).ResourceVersion }
	before := version()
	stop()
	startController(t)
	somethingElseHappens(t)
	if version() != before {
		t.Error("the next controller writes to nodes without labels")
	}
}
