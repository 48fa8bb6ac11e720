package main

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// ill has something wrong of each kind.
func ill(s *server) {
	healthy(s)
	inv := s.items[own+"gpuinventories"][0].(v1alpha1.GPUInventory)
	inv.Status.GPUs[2].Conditions = []v1alpha1.GPUCondition{
		{Type: string(gpu.ResetRequired), Status: metav1.ConditionTrue, Message: "XID 95: the driver asks for a reset"},
		{Type: string(gpu.NVLinkDown), Status: metav1.ConditionTrue, Message: "1 of 18 links is down"},
	}
	inv.Status.Conditions = append(inv.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionDoubleAllocation, Status: metav1.ConditionTrue, Reason: v1alpha1.DoubleAllocationReason("v1.37.1"),
		Message: "A scheduler of the cluster allocated gpu-00000001-mig-3g40gb-0 to claim lab/notebook, and gpu-00000001-mig-1g10gb-0 to claim team/late, which the node refuses.",
	})
	silent := v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: "quiet"}}
	silent.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonPluginSilent, Message: "The plugin hasn't answered for 2m0s."}}
	s.items[own+"gpuinventories"] = []any{inv, silent}
	policy := func(name, condition string, reason, message string) any {
		p := v1alpha1.SharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
		p.Status.Conditions = []metav1.Condition{{Type: condition, Status: metav1.ConditionFalse, Reason: reason, Message: message}}
		return p
	}
	s.items[own+"sharingpolicies"] = []any{
		policy("shares", v1alpha1.ConditionApplied, v1alpha1.ReasonWaiting, "1 device waits for its claim."),
		policy("typo", v1alpha1.ConditionAccepted, v1alpha1.ReasonInvalid, "spec.gpuSelector: undeclared reference to 'devise'."),
	}
	s.items["/api/v1/pods"] = append(s.items["/api/v1/pods"], program("tessera-mps-9q2lm", "mps", inv.Name, false))
	gone := claim("team", "forgotten", "", "gpu-0000000a")
	gone.Status.Allocation.Devices.Results[0].Pool = "scrapped"
	s.items[resources+"resourceclaims"] = append(s.items[resources+"resourceclaims"], gone)
}

// refused has no plugins, because the namespace enforces a level of Pod Security, and one
// supervisor less than it should have, which is being created.
func refused(s *server) {
	controller := program("tessera-controller-5f6c", "controller", "node", true)
	s.items[own+"gpuinventories"], s.items[resources+"resourceslices"], s.items[resources+"resourceclaims"] = []any{}, []any{}, []any{}
	s.items["/api/v1/pods"] = []any{controller}
	set := func(name string, desired, current int32) appsv1.DaemonSet {
		d := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "tessera-system", Name: name}}
		d.Status.DesiredNumberScheduled, d.Status.CurrentNumberScheduled = desired, current
		return d
	}
	s.items["/apis/apps/v1/daemonsets"] = []any{set("tessera-node", 2, 0), set("tessera-mps", 2, 1)}
	failed := func(name, kind, message string, at int64) corev1.Event {
		e := corev1.Event{Reason: failedCreate, Message: message, LastTimestamp: metav1.Unix(at, 0)}
		e.InvolvedObject = corev1.ObjectReference{Namespace: "tessera-system", Kind: kind, Name: name}
		return e
	}
	s.items["/api/v1/namespaces/tessera-system/events"] = []any{
		failed("tessera-node", "DaemonSet", `Error creating: pods "tessera-node-" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostPID=true), privileged`, 9),
		failed("tessera-node", "DaemonSet", "Error creating: Internal error occurred: the server starts", 5),
		failed("tessera-mps", "ReplicaSet", "Error creating: another kind", 9),
	}
}
