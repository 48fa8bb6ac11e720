package prepare

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Cluster answers questions about holders with GETs to the API server. It
// needs the right to get ResourceClaims.
type Cluster struct {
	claims       resourceclient.ResourceClaimsGetter
	driver, pool string
}

// NewCluster builds a Cluster for one node's pool.
func NewCluster(claims resourceclient.ResourceClaimsGetter, driver, pool string) *Cluster {
	return &Cluster{claims: claims, driver: driver, pool: pool}
}

// Look implements Holders.
func (c *Cluster) Look(ctx context.Context, holder Holder) (Standing, error) {
	claim, err := c.claims.ResourceClaims(holder.Namespace).Get(ctx, holder.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && claim.UID != holder.UID {
		return Standing{AwaitsUnprepare: true, Reason: "the claim was deleted"}, nil
	}
	if err != nil {
		return Standing{}, err
	}
	if reason := whyUnneeded(claim, holder, c.driver, c.pool); reason != "" {
		return Standing{AwaitsUnprepare: true, Reason: reason}, nil
	}
	return Standing{Reason: user(claim) + " uses it"}, nil
}

// user names what the claim is reserved for: the first, where there are more.
// It isn't asked for: a claim is deallocated, and its device allocated to
// another, only after nothing that is left uses it, so an allocated claim with a
// user keeps its device.
func user(claim *resourceapi.ResourceClaim) string {
	ref := claim.Status.ReservedFor[0]
	if ref.APIGroup == "" && ref.Resource == "pods" {
		return fmt.Sprintf("pod %s/%s", claim.Namespace, ref.Name)
	}
	return ref.Resource + " " + ref.Name
}

// whyUnneeded says in words why the claim has no right to its devices any more;
// empty where it has.
func whyUnneeded(claim *resourceapi.ResourceClaim, holder Holder, driver, pool string) string {
	switch {
	case claim.DeletionTimestamp != nil:
		return "the claim is being deleted"
	case claim.Status.Allocation == nil:
		return "the claim was deallocated"
	case !stillAllocated(claim.Status.Allocation, holder.Devices, driver, pool):
		return "the claim was allocated other devices"
	case len(claim.Status.ReservedFor) == 0:
		return "no pod uses the claim any more"
	default:
		return ""
	}
}

// stillAllocated reports whether the allocation has one of the devices.
func stillAllocated(allocation *resourceapi.AllocationResult, devices []gpu.DeviceName, driver, pool string) bool {
	return slices.ContainsFunc(allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == driver && r.Pool == pool && slices.Contains(devices, gpu.DeviceName(r.Device))
	})
}
