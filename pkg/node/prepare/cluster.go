package prepare

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Cluster answers questions about holders with GETs to the API server. It
// needs the right to get ResourceClaims and Pods.
type Cluster struct {
	claims       resourceclient.ResourceClaimsGetter
	pods         corev1client.PodsGetter
	driver, pool string
}

// NewCluster builds a Cluster for one node's pool.
func NewCluster(claims resourceclient.ResourceClaimsGetter, pods corev1client.PodsGetter, driver, pool string) *Cluster {
	return &Cluster{claims: claims, pods: pods, driver: driver, pool: pool}
}

// Look implements Holders.
func (c *Cluster) Look(ctx context.Context, holder Holder) (Standing, error) {
	claim, err := c.claims.ResourceClaims(holder.Namespace).Get(ctx, holder.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && claim.UID != holder.UID {
		return Standing{Leaving: true, Reason: "the claim was deleted"}, nil
	}
	if err != nil {
		return Standing{}, err
	}
	if reason := leaving(claim, holder, c.driver, c.pool); reason != "" {
		return Standing{Leaving: true, Reason: reason}, nil
	}
	return c.lookAtPods(ctx, claim)
}

// leaving says in words why the claim has no right to its devices any more;
// empty where it has.
func leaving(claim *resourceapi.ResourceClaim, holder Holder, driver, pool string) string {
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

// stillAllocated says whether the allocation has one of the devices.
func stillAllocated(allocation *resourceapi.AllocationResult, devices []gpu.DeviceName, driver, pool string) bool {
	return slices.ContainsFunc(allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == driver && r.Pool == pool && slices.Contains(devices, gpu.DeviceName(r.Device))
	})
}

// lookAtPods asks for the pods that the claim is reserved for.
func (c *Cluster) lookAtPods(ctx context.Context, claim *resourceapi.ResourceClaim) (Standing, error) {
	for _, ref := range claim.Status.ReservedFor {
		if ref.APIGroup != "" || ref.Resource != "pods" {
			return Standing{Reason: fmt.Sprintf("%s %s uses it", ref.Resource, ref.Name)}, nil
		}
		pod, err := c.pods.Pods(claim.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && (pod.UID != ref.UID || done(pod)) {
			continue
		}
		if err != nil {
			return Standing{}, fmt.Errorf("pod %s/%s: %w", claim.Namespace, ref.Name, err)
		}
		return Standing{Reason: fmt.Sprintf("pod %s/%s uses it", pod.Namespace, pod.Name)}, nil
	}
	return Standing{Leaving: true, Reason: "its pods are gone or ending"}, nil
}

// done says whether the pod is over, or on its way there.
func done(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
