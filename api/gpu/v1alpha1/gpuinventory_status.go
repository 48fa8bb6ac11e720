package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// HasForeignSlices reports whether the controller has found ResourceSlices that
// another driver keeps writing for the node.
func (s *GPUInventoryStatus) HasForeignSlices() bool {
	c := meta.FindStatusCondition(s.Conditions, ConditionConflicting)
	return c != nil && c.Status == metav1.ConditionTrue && c.Reason == ReasonForeignSlices
}
