package prepare

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// standing is how a claim that holds a device stands in the cluster.
type standing struct {
	// awaitsUnprepare: nothing in the cluster uses the claim's devices any more; the kubelet
	// will unprepare it.
	awaitsUnprepare bool
	// reason in words, such as "the claim was deleted" or "pod default/trainer uses it".
	reason string
}

// readStanding reads a recorded claim from the API server. An error means that its
// standing can't be told now.
func (p *Preparer) readStanding(ctx context.Context, r holding.Record) (standing, error) {
	claim, err := p.cfg.Cluster.ResourceClaims(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && string(claim.UID) != r.ClaimUID {
		return standing{awaitsUnprepare: true, reason: "the claim was deleted"}, nil
	}
	if err != nil {
		return standing{}, fmt.Errorf("ask the API server about it: %w", err)
	}
	if reason := p.whyUnneeded(claim, r); reason != "" {
		return standing{awaitsUnprepare: true, reason: reason}, nil
	}
	return standing{reason: user(claim) + " uses it"}, nil
}

// user names what the claim is reserved for: the first, where there are more.
// The pod needn't be checked: while a claim is reserved, the scheduler gives its
// device to nobody else.
func user(claim *resourceapi.ResourceClaim) string {
	ref := claim.Status.ReservedFor[0]
	if ref.APIGroup == "" && ref.Resource == "pods" {
		return fmt.Sprintf("pod %s/%s", claim.Namespace, ref.Name)
	}
	return ref.Resource + " " + ref.Name
}

// whyUnneeded says in words why the claim has no right to its devices any more;
// empty where it has.
func (p *Preparer) whyUnneeded(claim *resourceapi.ResourceClaim, r holding.Record) string {
	switch {
	case claim.DeletionTimestamp != nil:
		return "the claim is being deleted"
	case claim.Status.Allocation == nil:
		return "the claim was deallocated"
	case !p.isAllocated(claim.Status.Allocation, r):
		return "the claim was allocated other devices"
	case len(claim.Status.ReservedFor) == 0:
		return "no pod uses the claim any more"
	default:
		return ""
	}
}

// isAllocated reports whether the allocation has one of the devices that the record holds.
func (p *Preparer) isAllocated(allocation *resourceapi.AllocationResult, r holding.Record) bool {
	return slices.ContainsFunc(allocation.Devices.Results, func(a resourceapi.DeviceRequestAllocationResult) bool {
		holds := func(h holding.Holding) bool { return !h.Admin && string(h.Device) == a.Device }
		return a.Driver == p.cfg.Driver && a.Pool == p.cfg.Pool && slices.ContainsFunc(r.Holdings, holds)
	})
}
