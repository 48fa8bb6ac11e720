package v1alpha1

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// HasForeignSlices reports whether the controller has found ResourceSlices that
// another driver keeps writing for the node.
func (s *GPUInventoryStatus) HasForeignSlices() bool {
	c := meta.FindStatusCondition(s.Conditions, ConditionConflicting)
	return c != nil && c.Status == metav1.ConditionTrue && c.Reason == ReasonForeignSlices
}

// DoubleAllocationReason returns the reason of the condition DoubleAllocation while the API
// server has a version of Kubernetes, such as v1.36.3. A reason may have no dots.
func DoubleAllocationReason(kubernetes string) string {
	return "Kubernetes_" + strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' {
			return r
		}
		return '_'
	}, kubernetes)
}
