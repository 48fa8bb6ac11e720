package report_test

import (
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

const droppedMessage = "dropped fields of the GPUInventory's status"

// TestFieldsThatTheServerDrops checks that a plugin whose CRDs are of an older
// version writes its status once for each change, and not again and again.
func TestFieldsThatTheServerDrops(t *testing.T) {
	s := newServer(t)
	s.drop = func(status *v1alpha1.GPUInventoryStatus) {
		status.BootID = ""
		for i := range status.GPUs {
			for j := range status.GPUs[i].Conditions {
				status.GPUs[i].Conditions[j].LastTransitionTime = nil
			}
		}
	}
	r, _ := start(t, s)
	lost := h100
	lost.Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "gone"}}
	r.Found(node(lost))
	if err := r.WaitReported(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.SetRegistered()
	for n := range int64(3) {
		s.request(n + 1)
		eventually(t, s, "an answer", func(inv *v1alpha1.GPUInventory) bool { return inv.Status.PublishResponse == n+1 })
	}
	// The first write creates the object; registration and the first request may
	// share a write.
	if _, writes := s.get(); writes > 6 {
		t.Errorf("%d writes, want one for each change", writes)
	}
	if !strings.Contains(r.logged(), droppedMessage) {
		t.Errorf("the dropped fields aren't logged:\n%s", r.logged())
	}
}

// TestServerThatDropsNothing checks that times, which the API stores in whole
// seconds, don't count as dropped fields.
func TestServerThatDropsNothing(t *testing.T) {
	s := newServer(t)
	r, stop := start(t, s)
	lost := h100
	lost.Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "gone"}}
	r.Found(node(lost))
	eventually(t, s, "the first report", ready(report.ReasonNotRegistered))
	r.SetRegistered()
	eventually(t, s, "a condition that changes", ready(report.ReasonRegistered))
	stop()
	if strings.Contains(r.logged(), droppedMessage) {
		t.Errorf("fields count as dropped:\n%s", r.logged())
	}
}
