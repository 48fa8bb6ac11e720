package nodes

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/server"
)

// The scheduler may be older than the API server, whose version decides which devices are
// offered. A plugin that refuses a double allocation of devices that exclude each other by
// counters sets a condition of its GPUInventory, and the counters of this node aren't used
// until the API server has another version.

// endDoubleAllocation sets the condition to False once the API server has another version.
// A condition that is younger than server.Steady may be of a server that this controller hasn't
// asked yet.
func (n *Reconciler) endDoubleAllocation(ctx context.Context, inv *v1alpha1.GPUInventory) error {
	c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionDoubleAllocation)
	if c == nil || c.Status != metav1.ConditionTrue || n.Clock.Since(c.LastTransitionTime.Time) < server.Steady {
		return nil
	}
	able, err := n.Server.Abilities(ctx)
	if err != nil || able.Doubt != "" || able.Version == "" || c.Reason == v1alpha1.DoubleAllocationReason(able.Version) {
		return err
	}
	return n.setCondition(ctx, inv, metav1.Condition{
		Type: v1alpha1.ConditionDoubleAllocation, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNewVersion,
		Message: fmt.Sprintf("the API server is Kubernetes %s now", able.Version),
	})
}
