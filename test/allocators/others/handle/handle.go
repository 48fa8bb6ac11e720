// Package handle shows plugins of Kubernetes' scheduler 1.34 a request of the play as if it was
// a cluster: schedulers of others use these plugins, or the same handle for plugins of
// their own.
package handle

import (
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/dynamicresources"
	"k8s.io/kubernetes/pkg/scheduler/util/assumecache"

	"github.com/tessera-dra/tessera/test/allocators/protocol"
)

// Name of the plugin DynamicResources.
const Name = "DynamicResources"

// ErrWaits is the error that the pod has to wait.
var ErrWaits = errors.New("the pod has to wait")

type request = protocol.Request[resourceapi.DeviceClass, resourceapi.ResourceSlice, resourceapi.DeviceRequestAllocationResult, resourceapi.ResourceClaim]

// Handle is a cluster of one node. Its methods that plugins for devices don't call aren't there.
type Handle struct {
	framework.Handle

	// Pod has the claim that is to be allocated.
	Pod  *corev1.Pod
	Node *corev1.Node

	request request
	claims  *tracker
}

// tracker is Kubernetes' own, and keeps the allocation.
type tracker struct {
	framework.ResourceClaimTracker
	allocated *resourceapi.AllocationResult
}

// SignalClaimPendingAllocation implements framework.ResourceClaimTracker.
func (t *tracker) SignalClaimPendingAllocation(uid types.UID, claim *resourceapi.ResourceClaim) error {
	t.allocated = claim.Status.Allocation
	return t.ResourceClaimTracker.SignalClaimPendingAllocation(uid, claim)
}

// AssumeClaimAfterAPICall implements framework.ResourceClaimTracker.
func (t *tracker) AssumeClaimAfterAPICall(claim *resourceapi.ResourceClaim) error {
	t.allocated = claim.Status.Allocation
	return t.ResourceClaimTracker.AssumeClaimAfterAPICall(claim)
}

// Main is the program of a scheduler. Allocate is called for each request, with the handle that
// newAllocate has. It allocates the pod's claim on the node, or returns ErrWaits.
func Main(newAllocate func(h *Handle) (allocate func(context.Context) error, err error)) {
	h := &Handle{}
	allocate, err := newAllocate(h)
	protocol.Main(func(_ struct{}, r request) (*resourceapi.AllocationResult, error) {
		if err != nil {
			return nil, err
		}
		h.set(r)
		if err := allocate(context.Background()); err != nil && !errors.Is(err, ErrWaits) {
			return nil, err
		}
		return h.claims.allocated, nil
	})
}

func (h *Handle) set(r request) {
	h.request = r
	h.Node = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: r.Node}}
	h.Pod = &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "pod", Namespace: r.Claim.Namespace, UID: "pod"},
		Spec:       corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{{Name: "claim", ResourceClaimName: &r.Claim.Name}}},
	}
	cache := assumecache.NewAssumeCache(klog.Background(), nil, "claims", "", nil)
	manager := dynamicresources.NewDRAManager(context.Background(), cache, nil, informers.NewSharedInformerFactory(nil, 0))
	claim := r.Claim.DeepCopy()
	claim.ResourceVersion = "1"
	assumecache.AddTestObject(cache, claim)
	for i, result := range r.Allocated {
		held := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("held-%d", i), Namespace: r.Claim.Namespace, UID: types.UID(fmt.Sprint("held-", i)), ResourceVersion: "1",
		}}
		held.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}}}
		assumecache.AddTestObject(cache, held)
	}
	h.claims = &tracker{ResourceClaimTracker: manager.ResourceClaims()}
}

// Filter asks a plugin whether the claim can be allocated; ErrWaits: no.
func (h *Handle) Filter(ctx context.Context, state fwk.CycleState, first framework.PreFilterPlugin, then framework.FilterPlugin) error {
	node := framework.NewNodeInfo()
	node.SetNode(h.Node)
	if _, status := first.PreFilter(ctx, state, h.Pod, []fwk.NodeInfo{node}); !status.IsSuccess() {
		return failure(status)
	}
	return failure(then.Filter(ctx, state, h.Pod, node))
}

// Reserve has a plugin allocate the devices that Filter has found.
func (h *Handle) Reserve(ctx context.Context, state fwk.CycleState, p framework.ReservePlugin) error {
	return failure(p.Reserve(ctx, state, h.Pod, h.Node.Name))
}

// failure returns a status as an error. A pod waits as well if its claim has fields that the plugin
// refuses, because their feature is off.
func failure(s *fwk.Status) error {
	if s.IsRejected() || strings.Contains(s.Message(), "feature is disabled") {
		return ErrWaits
	}
	return s.AsError()
}

// ClientSet implements framework.Handle. Nothing that the play needs calls the API server.
func (h *Handle) ClientSet() kubernetes.Interface { return nil }

// SharedDRAManager implements framework.Handle.
func (h *Handle) SharedDRAManager() framework.SharedDRAManager { return manager{h} }

// manager is a framework.SharedDRAManager of the current request.
type manager struct{ h *Handle }

// ResourceClaims implements framework.SharedDRAManager.
func (m manager) ResourceClaims() framework.ResourceClaimTracker { return m.h.claims }

// ResourceSlices implements framework.SharedDRAManager.
func (m manager) ResourceSlices() framework.ResourceSliceLister { return m }

// DeviceClasses implements framework.SharedDRAManager.
func (m manager) DeviceClasses() framework.DeviceClassLister {
	return protocol.Classes[resourceapi.DeviceClass]{All: m.h.request.Classes, Names: func(c *resourceapi.DeviceClass) string { return c.Name }}
}

// ListWithDeviceTaintRules implements framework.ResourceSliceLister. There are no rules.
func (m manager) ListWithDeviceTaintRules() ([]*resourceapi.ResourceSlice, error) {
	return m.h.request.Slices, nil
}
