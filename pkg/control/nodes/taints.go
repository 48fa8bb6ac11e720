package nodes

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/plan"
)

// A scheduler that is older than the API server, or lacks the feature gate
// DRADeviceTaints, ignores the taints that the server stores, and gives out blocked
// devices. Its allocations show that.

const (
	// taintKnownWithin is how soon after a taint was published each scheduler knows it.
	taintKnownWithin = time.Minute
	// maxClockSkew is how far the clocks of the controller, which says since when a taint
	// is published, and of an API server, which says when a claim was created, may be
	// apart. Without it, a server whose clock is ahead makes older claims look like
	// evidence, and taints aren't used for a day.
	maxClockSkew = 5 * time.Minute
)

// ignoredTaint is a device that a claim was allocated although it doesn't tolerate the
// device's taint.
type ignoredTaint struct {
	device, claim string
	taint         resourceapi.DeviceTaint
}

// checkIgnoredTaints withdraws blocked devices instead of tainting them if a scheduler
// ignores the taints of the node's devices, which have been published since a time. Only claims
// that were created after that are evidence: of others it isn't known when they were
// allocated.
func (n *Reconciler) checkIgnoredTaints(ctx context.Context, inv *v1alpha1.GPUInventory, blocked []plan.BlockedDevice, since time.Time) error {
	if len(blocked) == 0 {
		return nil
	}
	created, err := n.Claims.CreatedAfter(inv.Name, since.Add(taintKnownWithin+maxClockSkew))
	if err != nil {
		return err
	}
	ignored, ok := findIgnoredTaint(inv.Name, blocked, created)
	if !ok || !n.Server.DistrustTaints() {
		return nil
	}
	text := fmt.Sprintf("A scheduler of the cluster ignores device taints: it allocated %s, which has the taint %s=%s:%s, to claim %s. "+
		"It is older than the API server, or lacks the feature gate DRADeviceTaints: upgrade all schedulers. "+
		"For a day, devices of unhealthy GPUs are withdrawn on all nodes instead of tainted; restart the controller to end that earlier.",
		ignored.device, ignored.taint.Key, ignored.taint.Value, ignored.taint.Effect, ignored.claim)
	klog.FromContext(ctx).Info(text)
	n.Events.Eventf(inv, nil, corev1.EventTypeWarning, "TaintIgnored", "Withdraw", "%s", text)
	return nil
}

// findIgnoredTaint returns the first of a node's blocked devices that a claim was allocated
// although it doesn't tolerate one of the device's taints.
func findIgnoredTaint(node string, blocked []plan.BlockedDevice, created []*resourceapi.ResourceClaim) (ignoredTaint, bool) {
	var all []ignoredTaint
	for _, d := range blocked {
		for _, t := range d.Taints {
			for _, c := range created {
				tolerates := func(x resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(x, t) }
				if slices.ContainsFunc(claims.Results(c), func(r resourceapi.DeviceRequestAllocationResult) bool {
					return r.Pool == node && r.Device == d.Name && !slices.ContainsFunc(r.Tolerations, tolerates)
				}) {
					all = append(all, ignoredTaint{device: d.Name, claim: c.Namespace + "/" + c.Name, taint: t})
				}
			}
		}
	}
	if len(all) == 0 {
		return ignoredTaint{}, false
	}
	return slices.MinFunc(all, func(a, b ignoredTaint) int {
		return cmp.Or(cmp.Compare(a.device, b.device), cmp.Compare(a.claim, b.claim))
	}), true
}
