package doctor

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// ill has something wrong of each kind.
func ill(s *kubectltest.Server) {
	kubectltest.Healthy(s)
	inv := s.Items[kubectltest.Own+"gpuinventories"][0].(v1alpha1.GPUInventory)
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
	s.Items[kubectltest.Own+"gpuinventories"] = []any{inv, silent}
	policy := func(name, condition string, reason, message string) any {
		p := v1alpha1.SharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
		p.Status.Conditions = []metav1.Condition{{Type: condition, Status: metav1.ConditionFalse, Reason: reason, Message: message}}
		return p
	}
	s.Items[kubectltest.Own+"sharingpolicies"] = []any{
		policy("shares", v1alpha1.ConditionApplied, v1alpha1.ReasonWaiting, "1 device waits for its claim."),
		policy("typo", v1alpha1.ConditionAccepted, v1alpha1.ReasonInvalid, "spec.gpuSelector: undeclared reference to 'devise'."),
	}
	s.Items["/api/v1/pods"] = append(s.Items["/api/v1/pods"], kubectltest.Program("tessera-mps-9q2lm", "mps", inv.Name, false))
	gone := kubectltest.Claim("team", "forgotten", "", "gpu-0000000a")
	gone.Status.Allocation.Devices.Results[0].Pool = "scrapped"
	s.Items[kubectltest.Resources+"resourceclaims"] = append(s.Items[kubectltest.Resources+"resourceclaims"], gone)
}

// refused has no plugins, because the namespace enforces a level of Pod Security, and one
// supervisor less than it should have, which is being created.
func refused(s *kubectltest.Server) {
	controller := kubectltest.Program("tessera-controller-5f6c", "controller", "node", true)
	s.Items[kubectltest.Own+"gpuinventories"], s.Items[kubectltest.Resources+"resourceslices"], s.Items[kubectltest.Resources+"resourceclaims"] = []any{}, []any{}, []any{}
	s.Items["/api/v1/pods"] = []any{controller}
	set := func(name string, desired, current int32) appsv1.DaemonSet {
		d := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "tessera-system", Name: name}}
		d.Status.DesiredNumberScheduled, d.Status.CurrentNumberScheduled = desired, current
		return d
	}
	s.Items["/apis/apps/v1/daemonsets"] = []any{set("tessera-node", 2, 0), set("tessera-mps", 2, 1)}
	failed := func(name, kind, message string, at int64) corev1.Event {
		e := corev1.Event{Reason: failedCreate, Message: message, LastTimestamp: metav1.Unix(at, 0)}
		e.InvolvedObject = corev1.ObjectReference{Namespace: "tessera-system", Kind: kind, Name: name}
		return e
	}
	s.Items["/api/v1/namespaces/tessera-system/events"] = []any{
		failed("tessera-node", "DaemonSet", `Error creating: pods "tessera-node-" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostPID=true), privileged`, 9),
		failed("tessera-node", "DaemonSet", "Error creating: Internal error occurred: the server starts", 5),
		failed("tessera-mps", "ReplicaSet", "Error creating: another kind", 9),
	}
}
