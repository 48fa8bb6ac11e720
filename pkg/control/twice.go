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

// The scheduler may be older than the API server, whose version decides whether
// shares may consume counters. A plugin that refuses a double allocation of such a
// share reports it in its GPUInventory. That field is all that is remembered, so that
// the decision is the same after a restart of the controller.

// twiceIndex finds the inventories with a confirmed double allocation.
const (
	twiceIndex     = "status.allocatedTwice"
	twiceConfirmed = "confirmed"
)

// indexTwice is the function of twiceIndex.
func indexTwice(o client.Object) []string {
	if confirmedTwice(o) == nil {
		return nil
	}
	return []string{twiceConfirmed}
}

// confirmedTwice returns the double allocation that counts; nil if there is none.
func confirmedTwice(o client.Object) *v1alpha1.DoubleAllocation {
	inv, ok := o.(*v1alpha1.GPUInventory)
	if !ok || inv.Status.AllocatedTwice == nil || !inv.Status.AllocatedTwice.Confirmed {
		return nil
	}
	return inv.Status.AllocatedTwice
}

// twiceChanged lets events pass of inventories whose confirmed double allocation
// came, changed or went.
func twiceChanged() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return confirmedTwice(e.Object) != nil },
		DeleteFunc: func(e event.DeleteEvent) bool { return confirmedTwice(e.Object) != nil },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return !equality.Semantic.DeepEqual(confirmedTwice(e.ObjectOld), confirmedTwice(e.ObjectNew))
		},
		GenericFunc: func(event.GenericEvent) bool { return false },
	}
}

// whyUncharged returns why the scheduler isn't trusted with shares that consume
// counters although the server's version is fixed: a sentence. It is empty if it is.
func (p *planner) whyUncharged(ctx context.Context, able publish.Abilities) (string, error) {
	if !able.Charged {
		return "", nil
	}
	var list v1alpha1.GPUInventoryList
	if err := p.client.List(ctx, &list, client.MatchingFields{twiceIndex: twiceConfirmed}, client.UnsafeDisableDeepCopy); err != nil {
		return "", fmt.Errorf("list GPUInventories with double allocations: %w", err)
	}
	counts := slices.DeleteFunc(list.Items, func(inv v1alpha1.GPUInventory) bool {
		then := inv.Status.AllocatedTwice.Kubernetes
		return then != "" && able.Version != "" && then != able.Version
	})
	if len(counts) == 0 {
		return "", nil
	}
	first := slices.MinFunc(counts, func(a, b v1alpha1.GPUInventory) int { return cmp.Compare(a.Name, b.Name) })
	return explainTwice(first.Name, *first.Status.AllocatedTwice, able.Version), nil
}

func explainTwice(node string, d v1alpha1.DoubleAllocation, version string) string {
	return fmt.Sprintf("The scheduler is older than the API server (%s): on node %s it allocated the same part of a GPU to two claims at the same time (%s to claims %s; %s). "+
		"Upgrade all schedulers to Kubernetes %s, 1.37.0 or later; after that, remove the record: kubectl patch gpuinventory %s --subresource=status --type=merge -p '{\"status\":{\"allocatedTwice\":null}}'.",
		orUnknownVersion(version), node, strings.Join(d.Devices, " and "), strings.Join(d.Claims, " and "), allocator.Issue, allocator.Fixed, node)
}

func orUnknownVersion(version string) string { return cmp.Or(version, "of an unknown version") }

// offersBoth reports whether the node's plan offers two devices at once that only
// counters keep apart. Otherwise a plan that has changed since explains that both were
// allocated, or another double allocation is known.
func (p *planner) offersBoth(ctx context.Context, inv *v1alpha1.GPUInventory, devices []string) (bool, error) {
	in, err := p.collectInput(ctx, inv)
	if err != nil {
		return false, err
	}
	n := inventory.Node(inv)
	server := in.server()
	if !server.Charged {
		return false, nil
	}
	_, plans := verdictsFor(n, in)
	for _, g := range offer.Build(n, plans, nil, server) {
		found := 0
		for _, d := range g.Devices {
			if slices.Contains(devices, d.Name) && len(d.ConsumesCounters) > 0 {
				found++
			}
		}
		if found == len(devices) && slices.ContainsFunc(g.Devices, func(d resourceapi.Device) bool {
			return slices.Contains(devices, d.Name) && d.AllowMultipleAllocations != nil
		}) {
			return true, nil
		}
	}
	return false, nil
}

// judgeTwice confirms or removes a double allocation that a plugin has reported.
func (n *nodeReconciler) judgeTwice(ctx context.Context, inv *v1alpha1.GPUInventory) error {
	d := inv.Status.AllocatedTwice
	if d == nil || d.Confirmed {
		return nil
	}
	confirmed, err := n.planner.offersBoth(ctx, inv, d.Devices)
	if err != nil {
		return err
	}
	changed := inv.DeepCopy()
	if changed.Status.AllocatedTwice.Confirmed = confirmed; !confirmed {
		changed.Status.AllocatedTwice = nil
	}
	err = n.client.Status().Patch(ctx, changed, client.MergeFromWithOptions(inv, client.MergeFromWithOptimisticLock{}))
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // the newer inventory is reconciled next
	case err != nil:
		return fmt.Errorf("judge the double allocation of GPUInventory %s: %w", inv.Name, err)
	}
	klog.FromContext(ctx).Info("Judged a double allocation", "devices", d.Devices, "claims", d.Claims, "confirmed", confirmed)
	if confirmed && n.events != nil {
		n.events.Eventf(inv, nil, corev1.EventTypeWarning, "AllocatedTwice", "WithdrawShares",
			"%s", cut(fmt.Sprintf("The scheduler, which is older than the API server, allocated %s to claims %s at the same time. "+
				"Until it is upgraded, shares that consume counters are offered on no node; the status of the SharingPolicies concerned says more.",
				strings.Join(d.Devices, " and "), strings.Join(d.Claims, " and ")), maxEvent))
	}
	return nil
}
