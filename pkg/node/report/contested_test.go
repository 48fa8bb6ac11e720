package report_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

// TestContestedNode checks that the plugin keeps the controller's condition that
// another driver publishes the node's GPUs, and isn't ready meanwhile.
func TestContestedNode(t *testing.T) {
	s := newServer(t)
	r, _ := start(t, s)
	r.Found(node(h100))
	r.SetRegistered()
	eventually(t, s, "a plugin at work", ready(report.ReasonRegistered))
	controller := func(status metav1.ConditionStatus, reason string) {
		s.change("gpuinventories", func() (string, any) {
			inv := s.inventory.DeepCopy()
			meta.SetStatusCondition(&inv.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionConflicting, Status: status, Reason: reason, Message: "x"})
			s.store(inv)
			return "MODIFIED", inv
		})
	}
	controller(metav1.ConditionTrue, v1alpha1.ReasonForeignSlices)
	inv := eventually(t, s, "the plugin to agree", ready(report.ReasonConflicting))
	if c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionConflicting); c.Reason != v1alpha1.ReasonForeignSlices {
		t.Errorf("got %+v", c)
	}
	controller(metav1.ConditionFalse, v1alpha1.ReasonNoOtherDriver)
	eventually(t, s, "a plugin at work again", ready(report.ReasonRegistered))
}
