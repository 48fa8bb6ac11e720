package control

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// The scheduler may be older than the API server, whose version decides which devices are
// offered. A plugin that refuses a double allocation of devices that exclude each other by
// counters reports it in its GPUInventory. Nothing else is remembered, so that the decision
// is the same after a restart of the controller.

// doubleAllocationIndex finds the inventories with a confirmed double allocation.
const (
	doubleAllocationIndex = "status.doubleAllocation"
	confirmedKey          = "confirmed"
)

// indexDoubleAllocation is the function of doubleAllocationIndex.
func indexDoubleAllocation(o client.Object) []string {
	if confirmedDoubleAllocation(o) == nil {
		return nil
	}
	return []string{confirmedKey}
}

// confirmedDoubleAllocation returns the double allocation that counts; nil if there is
// none.
func confirmedDoubleAllocation(o client.Object) *v1alpha1.DoubleAllocation {
	inv, ok := o.(*v1alpha1.GPUInventory)
	if !ok || inv.Status.DoubleAllocation == nil || !inv.Status.DoubleAllocation.Confirmed {
		return nil
	}
	return inv.Status.DoubleAllocation
}

// doubleAllocationChanged passes events of inventories whose confirmed double allocation
// was added, changed or removed.
func doubleAllocationChanged() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return confirmedDoubleAllocation(e.Object) != nil },
		DeleteFunc: func(e event.DeleteEvent) bool { return confirmedDoubleAllocation(e.Object) != nil },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return !equality.Semantic.DeepEqual(confirmedDoubleAllocation(e.ObjectOld), confirmedDoubleAllocation(e.ObjectNew))
		},
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}

// distrust says which counters aren't used, although the server's version supports them,
// because a scheduler allocated something twice. With the zero value all are used.
type distrust struct {
	// counters: no counters are used. If it is false and why is set, only the counters that
	// shares consume aren't used.
	counters bool
	// why is the reason and the remedy: complete sentences. It is empty in the zero value.
	why string
}

// judgeScheduler returns the distrust that follows from the double allocations that count:
// those of the server's version, or all while servers of several versions answer in turns.
func (p *planner) judgeScheduler(ctx context.Context, able publish.Abilities) (distrust, error) {
	if !able.HasCounters() {
		return distrust{}, nil
	}
	var list v1alpha1.GPUInventoryList
	if err := p.client.List(ctx, &list, client.MatchingFields{doubleAllocationIndex: confirmedKey}, client.UnsafeDisableDeepCopy); err != nil {
		return distrust{}, fmt.Errorf("list GPUInventories with double allocations: %w", err)
	}
	counts := slices.DeleteFunc(list.Items, func(inv v1alpha1.GPUInventory) bool {
		d := inv.Status.DoubleAllocation
		older := d.Kubernetes != "" && able.Version != "" && d.Kubernetes != able.Version && able.Doubt == ""
		return older || inventory.AnyAllowsMultipleAllocations(d) && !able.Charged
	})
	if len(counts) == 0 {
		return distrust{}, nil
	}
	ofShares := func(inv v1alpha1.GPUInventory) bool {
		return inventory.AnyAllowsMultipleAllocations(inv.Status.DoubleAllocation)
	}
	if others := slices.DeleteFunc(slices.Clone(counts), ofShares); len(others) > 0 {
		counts = others // shares are withdrawn with the counters
	}
	first := slices.MinFunc(counts, func(a, b v1alpha1.GPUInventory) int { return cmp.Compare(a.Name, b.Name) })
	d := first.Status.DoubleAllocation
	return distrust{counters: !inventory.AnyAllowsMultipleAllocations(d), why: explainDoubleAllocation(first.Name, d, able.Version)}, nil
}

func explainDoubleAllocation(node string, d *v1alpha1.DoubleAllocation, version string) string {
	fault, remedy := "doesn't count shared counters as the API server stores them", "the API server's version"
	if inventory.AnyAllowsMultipleAllocations(d) {
		fault, remedy = "is older than the API server", fmt.Sprintf("Kubernetes %s, 1.37.0 or later (%s)", allocator.Fixed, allocator.Issue)
	}
	return fmt.Sprintf("A scheduler of the cluster %s (%s): on node %s it allocated the same part of a GPU to two claims at the same time (%s). "+
		"Upgrade all schedulers to %s; after that, remove the record: kubectl patch gpuinventory %s --subresource=status --type=merge -p '{\"status\":{\"doubleAllocation\":null}}'.",
		fault, cmp.Or(version, "of an unknown version"), node, describeDoubleAllocation(d), remedy, node)
}

// describeDoubleAllocation names both claims with their devices and pods.
func describeDoubleAllocation(d *v1alpha1.DoubleAllocation) string {
	one := func(c v1alpha1.AllocatedDevice) string {
		text := fmt.Sprintf("%s to claim %s/%s", c.Device, c.Namespace, c.Name)
		if c.Pod != "" {
			text += " of pod " + c.Pod
		}
		return text
	}
	return fmt.Sprintf("%s, and %s, which the node refuses", one(d.Holder), one(d.Refused))
}

// isExplained reports whether something else than the scheduler explains a double
// allocation of a node: the claims aren't allocated these devices, or the plan doesn't
// offer both at once, because it has changed, or another double allocation is known.
func (p *planner) isExplained(ctx context.Context, inv *v1alpha1.GPUInventory, d *v1alpha1.DoubleAllocation) (bool, error) {
	in, err := p.collectInput(ctx, inv)
	if err != nil {
		return false, err
	}
	var devices []string
	for _, c := range []v1alpha1.AllocatedDevice{d.Holder, d.Refused} {
		if allocated, err := p.claims.hasAllocated(ctx, inv.Name, c); err != nil || !allocated {
			return true, err
		}
		devices = append(devices, c.Device)
	}
	n := inventory.Node(inv)
	_, plans := verdictsFor(n, in)
	for _, g := range offer.Build(n, plans, nil, in.server()) {
		both := slices.DeleteFunc(slices.Clone(g.Devices), func(d resourceapi.Device) bool {
			return !slices.Contains(devices, d.Name) || len(d.ConsumesCounters) == 0
		})
		if len(both) == 2 {
			return false, nil
		}
	}
	return true, nil
}

// judgeDoubleAllocation confirms or removes a double allocation that a plugin has
// reported.
func (n *nodeReconciler) judgeDoubleAllocation(ctx context.Context, inv *v1alpha1.GPUInventory) error {
	d := inv.Status.DoubleAllocation
	if d == nil || d.Confirmed {
		return nil
	}
	explained, err := n.planner.isExplained(ctx, inv, d)
	if err != nil {
		return err
	}
	changed := inv.DeepCopy()
	if changed.Status.DoubleAllocation.Confirmed = !explained; explained {
		changed.Status.DoubleAllocation = nil
	}
	err = n.client.Status().Patch(ctx, changed, client.MergeFromWithOptions(inv, client.MergeFromWithOptimisticLock{}))
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // the newer inventory is reconciled next
	case err != nil:
		return fmt.Errorf("judge the double allocation of GPUInventory %s: %w", inv.Name, err)
	}
	klog.FromContext(ctx).Info("Judged a double allocation", "holder", d.Holder, "refused", d.Refused, "confirmed", !explained)
	if !explained && n.events != nil {
		n.events.Eventf(inv, nil, corev1.EventTypeWarning, "DoubleAllocation", "Withdraw", "%s", announce(d))
	}
	return nil
}

// announce is the text of the event about a confirmed double allocation.
func announce(d *v1alpha1.DoubleAllocation) string {
	withdrawn := "what needs shared counters (MIG partitions on demand, whole GPUs beside shares)"
	if inventory.AnyAllowsMultipleAllocations(d) {
		withdrawn = "shares that consume counters"
	}
	return strings.Join([]string{
		"A scheduler of the cluster, which seems to be older than the API server, allocated", describeDoubleAllocation(d) + ".",
		"Until it is upgraded,", withdrawn, "can't be offered on any node; the status of the SharingPolicies concerned says more.",
	}, " ")
}
