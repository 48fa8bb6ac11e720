package decision

import (
	"cmp"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// serverFor returns the abilities of server and scheduler that a node's offer may use.
func serverFor(inv *v1alpha1.GPUInventory, able publish.Abilities) offer.Server {
	s := able.ForOffers()
	if distrustsCounters(inv, able) {
		// A scheduler that doesn't know counters is as old as one that ignores taints.
		s.Counters, s.MaxTainted, s.Distrust = false, 0, distrustText(able)
	}
	return s
}

// distrustsCounters reports whether a node's counters aren't used because of a double
// allocation: one of the server's version, or any while servers of several versions answer
// in turns.
func distrustsCounters(inv *v1alpha1.GPUInventory, able publish.Abilities) bool {
	c := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionDoubleAllocation)
	return c != nil && c.Status == metav1.ConditionTrue && able.HasCounters() &&
		(able.Doubt != "" || able.Version == "" || c.Reason == v1alpha1.DoubleAllocationReason(able.Version))
}

// distrustText explains in complete sentences why the counters aren't used. It contains
// nothing that the node reports, because it is written to statuses of policies.
func distrustText(able publish.Abilities) string {
	return fmt.Sprintf("A scheduler of the cluster doesn't count shared counters as the API server (Kubernetes %s) stores them: "+
		"it allocated the same part of a GPU to two claims, which the condition %s of the node's GPUInventory names. "+
		"Upgrade all schedulers to the API server's version; after that, "+
		"delete the GPUInventory (kubectl delete gpuinventory NODE), and the node's plugin creates it again.",
		cmp.Or(able.Version, "of an unknown version"), v1alpha1.ConditionDoubleAllocation)
}
