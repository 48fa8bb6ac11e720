package report

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// ReportDoubleAllocation sets the condition DoubleAllocation, with the API server's version
// and a message, and returns nil once the object has it. A condition of the same version keeps
// its message. It isn't set again after somebody has removed it or deleted the object.
func (r *Reporter) ReportDoubleAllocation(ctx context.Context, kubernetes, message string) error {
	c := &metav1.Condition{
		Type: v1alpha1.ConditionDoubleAllocation, Status: metav1.ConditionTrue,
		Reason: v1alpha1.DoubleAllocationReason(kubernetes), Message: message,
	}
	r.mu.Change(func() { r.doubleAllocation = c })
	if err := r.mu.Wait(ctx, func() bool { return r.doubleAllocation == nil }); err != nil {
		return fmt.Errorf("set condition %s of GPUInventory %s: %w", c.Type, r.cfg.NodeName, err)
	}
	return nil
}

// setDoubleAllocation sets the condition that is to be written, if there is one; needs the
// lock.
func (r *Reporter) setDoubleAllocation(s *v1alpha1.GPUInventoryStatus, now metav1.Time) {
	if c := r.doubleAllocation; c != nil && !hasDoubleAllocation(s, c.Reason) {
		c.LastTransitionTime = now
		meta.RemoveStatusCondition(&s.Conditions, c.Type) // that of another version has another time
		meta.SetStatusCondition(&s.Conditions, *c)
	}
}

// hasDoubleAllocation reports whether the condition is set with a reason.
func hasDoubleAllocation(s *v1alpha1.GPUInventoryStatus, reason string) bool {
	c := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionDoubleAllocation)
	return c != nil && c.Status == metav1.ConditionTrue && c.Reason == reason
}
