//go:build integration

package control_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// A node is deleted and added again under its name, with other GPUs. The garbage collector
// is late: the inventory and the slices of the first Node are still there when the second
// one's plugin reports.
func TestNodeReplacedUnderItsName(t *testing.T) {
	stop := startController(t)
	n, kill := newPublishedNode(t, 4)
	claim := n.give(t, "gpu-00000002")
	first := n.pool(t)
	kill()
	if err := api.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}); err != nil {
		t.Fatal(err)
	}
	second := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	if err := api.Create(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	oldUID := n.uid
	n.uid = second.UID
	n.facts.GPUs = n.facts.GPUs[:2]
	for i := range n.facts.GPUs {
		n.facts.GPUs[i].UUID = gpu.UUID(fmt.Sprintf("GPU-%08x-0000-0000-0000-%012x", 0xa0+i, 0xa0+i))
	}
	n.report(t) // to the old inventory
	n.startPlugin(t)
	somethingElseHappens(t)

	// Now the garbage collector deletes what the first Node owned.
	if inv := n.inventory(t); inv.OwnerReferences[0].UID != oldUID {
		t.Fatalf("the inventory is owned by %s", inv.OwnerReferences[0].UID)
	} else if err := api.Delete(t.Context(), inv); err != nil {
		t.Fatal(err)
	}
	for _, s := range n.pool(t) {
		if s.OwnerReferences[0].UID == oldUID {
			_ = slices.Delete(t.Context(), s.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(s.UID))})
		}
	}
	n.report(t) // the plugin creates its inventory again
	ofSecond := func() bool {
		pool := n.pool(t)
		for _, s := range pool {
			if s.OwnerReferences[0].UID != second.UID {
				return false
			}
		}
		return cmp.Equal(gpusOf(pool), []string{"gpu-000000a0", "gpu-000000a1"})
	}
	eventually(t, "the second Node's GPUs are offered, and nothing else", ofSecond)
	release(t, claim)
	stop()
	startController(t)
	somethingElseHappens(t)
	if !ofSecond() {
		t.Errorf("after a restart of the controller %v are offered", gpusOf(n.pool(t)))
	}
	for _, s := range first {
		for _, now := range n.pool(t) {
			if s.UID == now.UID {
				t.Errorf("slice %s of the first Node is still there", s.Name)
			}
		}
	}
}
