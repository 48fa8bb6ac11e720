package kubectltest

import (
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
)

// Taint has an admin's rule keep claims off all devices of the node.
func Taint(s *Server) {
	pool := "node"
	r := resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "board"}}
	r.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{Pool: &pool}
	r.Spec.Taint = resourceapi.DeviceTaint{Key: "example.com/board", Value: "loose", Effect: resourceapi.DeviceTaintEffectNoSchedule}
	s.Items[Resources+"devicetaintrules"] = []any{r}
}

// MetricsPath is where the plugin's metrics of Busy are.
const MetricsPath = "/api/v1/namespaces/tessera-system/pods/http:tessera-node-x7k2p:8081/proxy/metrics"

// Busy has programs on GPUs: a whole one, a partition, and two pods with a share of the
// broken one, each with two containers.
func Busy(s *Server) {
	Healthy(s)
	p := Program("tessera-node-x7k2p", "node", "node", true)
	p.Spec.Containers = []corev1.Container{{Name: "kubelet-plugin", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 8081}}}}
	s.Items["/api/v1/pods"] = []any{p}
	share := Claim("lab", "both", "first", "gpu-00000003-mps-2-0")
	share.Status.ReservedFor = append(share.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "second", UID: "q"})
	s.Items[Resources+"resourceclaims"] = append(s.Items[Resources+"resourceclaims"], share)
	s.Metrics = map[string]string{MetricsPath: `# TYPE tessera_allocation_info gauge
tessera_allocation_info{uuid="MIG-0000",parent_uuid="GPU-00000001-0000-0000-0000-000000000000",type="mig",device="gpu-00000001-mig-3g40gb-4",share_id="",namespace="team",claim="infer-7c9-gpu",pod="infer-7c9-xk2p1"} 1
# TYPE tessera_gpu_memory_used_bytes gauge
tessera_gpu_memory_used_bytes{uuid="GPU-00000001-0000-0000-0000-000000000000"} 2.147483648e+09
tessera_gpu_memory_used_bytes{uuid="GPU-00000002-0000-0000-0000-000000000000"} 5.36870912e+10
# TYPE tessera_gpu_utilization_ratio gauge
tessera_gpu_utilization_ratio{uuid="GPU-00000002-0000-0000-0000-000000000000"} 0.75
# TYPE tessera_partition_memory_used_bytes gauge
tessera_partition_memory_used_bytes{uuid="MIG-0000",parent_uuid="GPU-00000001-0000-0000-0000-000000000000",gpu_instance_id="2",profile="3g.40gb"} 2.0971520e+09
# TYPE tessera_share_memory_used_bytes gauge
tessera_share_memory_used_bytes{device="gpu-00000003-mps-2-0",share_id="",namespace="lab",claim="both",pod="first",container="a"} 1.073741824e+09
tessera_share_memory_used_bytes{device="gpu-00000003-mps-2-0",share_id="",namespace="lab",claim="both",pod="first",container="b"} 5.36870912e+08
# TYPE tessera_share_utilization_ratio gauge
tessera_share_utilization_ratio{device="gpu-00000003-mps-2-0",share_id="",namespace="lab",claim="both",pod="first",container="a"} 0.25
`}
}

// Shares is a policy that takes two GPUs, of which claims have partitions.
const Shares = `{apiVersion: gpu.tessera.dev/v1alpha1, kind: SharingPolicy, metadata: {name: shares}, spec: {gpuSelector: 'device.attributes["gpu.nvidia.com"].index < 2', plan: {mps: {shares: 4}}}}`

// Shared has two policies, one of which takes precedence over shares on one GPU.
func Shared(s *Server) {
	all := v1alpha1.SharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "first"}}
	all.Spec.Priority, all.Spec.GPUSelector = 10, `device.attributes["gpu.nvidia.com"].index == 0`
	all.Spec.Plan.Exclusive = &v1alpha1.ExclusivePlan{}
	mine := v1alpha1.SharingPolicy{ObjectMeta: metav1.ObjectMeta{Name: "shares", Generation: 2}}
	mine.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "shared"}}
	mine.Spec.Plan.MPS = &v1alpha1.MPSPlan{Shares: new(int32(4))}
	mine.Status = v1alpha1.SharingPolicyStatus{
		ObservedGeneration: 2, Nodes: 1, GPUs: 1, WaitingDevices: 1,
		Served:    []v1alpha1.ServedNode{{Node: "node", GPUs: []string{"gpu-00000001"}}},
		Conflicts: []v1alpha1.PolicyConflict{{Policy: "first", GPUs: 1}},
		Waiting:   []v1alpha1.WaitingDevice{{Node: "node", Device: "gpu-00000001-mig-1g10gb-0", Claim: "lab/notebook"}},
		Conditions: []metav1.Condition{
			{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAccepted},
			{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonWaiting, Message: "1 device waits for its claim."},
		},
	}
	s.Items[Own+"sharingpolicies"] = []any{all, mine}
}

// Healthy has nothing that is wrong: its plugin runs, and no GPU has a condition.
func Healthy(s *Server) {
	inv := s.Items[Own+"gpuinventories"][0].(v1alpha1.GPUInventory)
	inv.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Registered"}}
	inv.Status.GPUs[2].Conditions = nil
	s.Items[Own+"gpuinventories"] = []any{inv}
	s.Items["/api/v1/pods"] = []any{Program("tessera-node-x7k2p", "node", inv.Name, true)}
}

// Program is one of Tessera's own pods.
func Program(name, component, node string, ready bool) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "tessera-system", Name: name, Labels: map[string]string{cluster.ComponentLabel: component}}}
	p.Spec.NodeName, p.Status.Phase = node, corev1.PodRunning
	if ready {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	} else {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "mps-supervisor", State: corev1.ContainerState{
			Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off 40s restarting failed container"},
		}}}
	}
	return p
}
