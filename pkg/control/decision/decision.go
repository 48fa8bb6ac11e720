// Package decision decides what a node offers: which policy each of its GPUs is under, what the
// conditions of its GPUs do by these policies, which devices follow, and which ResourceSlices
// they are in. The controller publishes that; kubectl gpu policy --dry-run and kubectl gpu
// template show it.
//
// It is pure: the same inventory and input give the same decision everywhere.
package decision

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// Input is everything that the decision on a node follows from, besides its inventory.
type Input struct {
	// Labels of the Node.
	Labels labels.Set
	// Policies that take part.
	Policies []policy.Policy
	// Allocated are the node's devices that claims have, except for admin access, each once
	// for each claim.
	Allocated []gpu.DeviceName
	// Able has the abilities of API server and scheduler.
	Able publish.Abilities
	// Now decides which of the devices that claims could not be given is to be tried again.
	Now time.Time
}

// Decision is the offer of one node.
type Decision struct {
	// Node has the inventory's facts, with the effects that policies give to conditions.
	Node gpu.Node
	// Verdicts say which policy each GPU is under.
	Verdicts map[gpu.UUID]policy.Verdict
	// GPUs are offered, by index.
	GPUs []offer.GPU
	// Pool has the slices of the offer.
	Pool []resourceapi.ResourceSlice
}

// Of returns the decision on a node.
func Of(inv *v1alpha1.GPUInventory, in Input) Decision {
	d := Decision{Node: inventory.Node(inv), Verdicts: make(map[gpu.UUID]policy.Verdict)}
	plans := make(map[gpu.UUID]v1alpha1.Plan, len(d.Node.GPUs))
	for _, g := range d.Node.GPUs {
		v := policy.Decide(in.Policies, in.Labels, offer.Whole(d.Node, g))
		d.Verdicts[g.UUID], plans[g.UUID] = v, v.Plan
		applyHealthPolicy(g.Conditions, v.Health)
		setTurns(g.Conditions, in.Now)
	}
	d.GPUs = offer.Build(d.Node, plans, in.Allocated, serverFor(inv, in.Able))
	d.Pool = publish.Pool(Owner(inv), d.GPUs, in.Able.Counters)
	return d
}

// Offer returns the offer of a GPU; false if nothing of it is offered.
func (d Decision) Offer(uuid gpu.UUID) (offer.GPU, bool) {
	i := slices.IndexFunc(d.GPUs, func(g offer.GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return offer.GPU{}, false
	}
	return d.GPUs[i], true
}

// Withheld returns the GPUs that new claims don't get, or only in part, whatever their plans.
func (d Decision) Withheld() []offer.WithheldGPU { return offer.Withheld(d.Node, d.GPUs) }

// applyHealthPolicy sets the effects that a policy gives to conditions.
func applyHealthPolicy(conditions []gpu.Condition, p v1alpha1.HealthPolicy) {
	gone := []gpu.ConditionType{gpu.Lost, gpu.BusResetRequired, gpu.RebootRequired}
	for i := range conditions {
		c := &conditions[i]
		if p.Evict && slices.Contains(gone, c.Type) {
			c.ByPolicy = gpu.NoExecute
		}
		if p.RowRemapPending == v1alpha1.NoSchedule && c.Type == gpu.RowRemapPending {
			c.ByPolicy = gpu.NoSchedule
		}
		if p.OnPrepareFailure == v1alpha1.EvictOnPrepareFailure && c.Type == gpu.PrepareFailed {
			c.ByPolicy = gpu.NoExecute
		}
	}
}

// setTurns sets which device of each GPU that refuses some is to be tried again.
func setTurns(conditions []gpu.Condition, now time.Time) {
	for i := range conditions {
		conditions[i].Turn, _ = gpu.TurnAt(conditions[i].RetryAt, now)
	}
}

// Owner returns the reference of the node's slices to their Node: the one that the
// inventory has. It has no UID if the inventory has none.
func Owner(inv *v1alpha1.GPUInventory) metav1.OwnerReference {
	for _, o := range inv.OwnerReferences {
		if o.Kind == "Node" && o.APIVersion == corev1.SchemeGroupVersion.String() && o.Name == inv.Name {
			return metav1.OwnerReference{APIVersion: o.APIVersion, Kind: o.Kind, Name: o.Name, UID: o.UID, Controller: new(true)}
		}
	}
	return metav1.OwnerReference{Name: inv.Name}
}
