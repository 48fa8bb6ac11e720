package why

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

const (
	podPath       = "/api/v1/namespaces/team/pods/train-0"
	eventsPath    = "/api/v1/namespaces/team/events"
	allEventsPath = "/api/v1/events"
	claimPath     = kubectltest.Resources + "namespaces/team/resourceclaims/train-gpu"
	inventoryPath = kubectltest.Own + "gpuinventories/node"
)

// bound is a cluster in which pod team/train-0 is on node "node", which hasn't started it. Its
// claim train-gpu has a partition of GPU 1.
type bound struct {
	*kubectltest.Server
	pod       *corev1.Pod
	node      *corev1.Node
	claim     *resourceapi.ResourceClaim
	inventory *v1alpha1.GPUInventory
}

func newBound(s *kubectltest.Server) bound {
	kubectltest.Healthy(s)
	claim := kubectltest.Claim("team", "train-gpu", "train-0", "gpu-00000002-mig-3g40gb-4")
	claim.UID = "c"
	inv := s.Items[kubectltest.Own+"gpuinventories"][0].(v1alpha1.GPUInventory)
	b := bound{Server: s, pod: &corev1.Pod{}, node: &corev1.Node{}, claim: &claim, inventory: &inv}
	b.node.Name = inv.Name
	b.node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	b.pod.ObjectMeta = metav1.ObjectMeta{Namespace: "team", Name: "train-0", UID: "p"}
	b.pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "train", Controller: new(true)}}
	b.pod.Spec.NodeName, b.pod.Status.Phase = inv.Name, corev1.PodPending
	b.pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("train-gpu")}}
	b.sandbox(corev1.ConditionFalse)
	s.Objects = map[string]any{podPath: b.pod, "/api/v1/nodes/node": b.node, claimPath: b.claim, inventoryPath: b.inventory}
	s.Items[eventsPath], s.Items[allEventsPath] = []any{}, []any{}
	return b
}

// sandbox sets whether the pod's sandbox is there.
func (b bound) sandbox(is corev1.ConditionStatus) {
	b.pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReadyToStartContainers, Status: is}}
}

// waiting has a container of the pod wait.
func (b bound) waiting(reason, message string) *corev1.ContainerStatus {
	b.sandbox(corev1.ConditionTrue)
	b.pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{
		Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message},
	}}}
	return &b.pod.Status.ContainerStatuses[0]
}

// gpu1 sets conditions of the pod's GPU.
func (b bound) gpu1(conditions ...v1alpha1.GPUCondition) {
	b.inventory.Status.GPUs[1].Conditions = conditions
}

// event is a warning by a component about an object, some time ago.
func event(by, kind, namespace, name, uid, reason, message string, ago time.Duration) corev1.Event {
	e := corev1.Event{Type: corev1.EventTypeWarning, Reason: reason, Message: message, LastTimestamp: metav1.NewTime(time.Now().Add(-ago - 20*time.Second))}
	e.InvolvedObject = corev1.ObjectReference{Kind: kind, Namespace: namespace, Name: name, UID: types.UID(uid)}
	e.Source.Component = by
	return e
}

// kubelets adds a warning of the kubelet about the pod.
func (b bound) kubelets(reason, message string, ago time.Duration) {
	b.Items[eventsPath] = append(b.Items[eventsPath], event("kubelet", "Pod", "team", "train-0", "p", reason, message, ago))
}

// refused adds the kubelet's warning that the plugin can't prepare the claim.
func (b bound) refused(message string, ago time.Duration) {
	b.kubelets(prepareFailed, "Failed to prepare dynamic resources: prepare dynamic resources: NodePrepareResources failed for ResourceClaim train-gpu: "+message, ago)
}

// prepareFailedCondition is a condition of a GPU that refuses a partition.
func prepareFailedCondition() v1alpha1.GPUCondition {
	return v1alpha1.GPUCondition{Type: "PrepareFailed", Status: metav1.ConditionTrue, Message: "a claim could not be given gpu-00000002-mig-3g40gb-4: the GPU can't create a 3g.40gb partition: insufficient resources",
		Refused: []string{"gpu-00000002-mig-3g40gb-4"}, RetryAt: new(metav1.Unix(4102444800, 0))}
}

const noRoom = `device "gpu-00000002-mig-3g40gb-4" for request "gpu": make MIG partition 3g.40gb at memory slices 4-7 of GPU ` +
	"GPU-00000002-0000-0000-0000-000000000000: create MIG instance 3g.40gb at 4: nvmlDeviceCreateGpuInstanceWithPlacement: insufficient resources " +
	"(Insufficient Resources): another instance, or missing engines, leave no room; there are no instances"

const heldByAnother = "device held by another claim: claim lab/old holds gpu-00000002, which is on its way out (the claim was deleted), " +
	"and the kubelet did not unprepare it within 43s; this will be tried again"

// stillInUse is the event of a claim that has the device.
func stillInUse(device string, ago time.Duration) corev1.Event {
	return event(nodePlugin, "ResourceClaim", "lab", "old", "o", inUse, "containers that have the claim's devices ("+device+") still run on this node, "+
		"so no other claim gets these yet; this is tried again: pod lab/old: process 4711 (python)", ago)
}

// TestNotStarted compares with testdata what why says of a pod that a node doesn't start.
func TestNotStarted(t *testing.T) {
	cases := map[string]func(b bound){
		"device": func(b bound) {
			b.refused("a message of before", 20*time.Minute)
			b.refused(noRoom, 12*time.Minute)
			b.gpu1(prepareFailedCondition(), v1alpha1.GPUCondition{Type: "NVLinkDown", Status: metav1.ConditionTrue, Message: "1 of 18 links is down"})
			b.Items[eventsPath] = append(b.Items[eventsPath],
				event(nodePlugin, "Pod", "team", "train-0", "p", "PrepareFailed", "GPU 1 can't create a 3g.40gb partition", 12*time.Minute),
				event("kubelet", "Pod", "team", "other", "q", prepareFailed, "of another pod", time.Minute))
		},
		"held": func(b bound) {
			b.refused(heldByAnother, 12*time.Minute)
			b.Items[allEventsPath] = []any{
				stillInUse("gpu-00000002", 5*time.Minute), stillInUse("gpu-00000002", 6*time.Minute), stillInUse("gpu-00000003", 5*time.Minute),
			}
		},
		"held-before": func(b bound) { b.Items[allEventsPath] = []any{stillInUse("gpu-00000002", 50*time.Minute)} },
		"configuration": func(b bound) {
			b.refused(`request "gpu": retrying can't help: configuration in the ResourceClaim, or the template it was made from: MigDeviceConfig: strict decoding error: unknown field "sharring"; correct it there and create the claim again`, 12*time.Minute)
		},
		"unlisted": func(b bound) { b.refused("something that nobody knows", 12*time.Minute) },
		"not-registered": func(b bound) {
			b.kubelets(prepareFailed, "Failed to prepare dynamic resources: prepare dynamic resources: DRA driver gpu.nvidia.com is not registered", 12*time.Minute)
		},
		"bare": func(b bound) {
			b.pod.OwnerReferences = nil
			b.refused(noRoom, 12*time.Minute)
		},
		"shared": func(b bound) {
			b.claim.Status.ReservedFor = append(b.claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "train-1", UID: "q"})
			b.refused(noRoom, 12*time.Minute)
		},
		"plugin-silent": func(b bound) {
			b.inventory.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonPluginSilent, Message: "The plugin hasn't answered for 2m0s."}}
			b.refused(noRoom, 12*time.Minute)
		},
		"no-driver": func(b bound) {
			b.inventory.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: "DriverNotFound", Message: "no NVIDIA driver on this host"}}
		},
		"no-plugin": func(b bound) { delete(b.Objects, inventoryPath) },
		"node-away": func(b bound) {
			b.node.Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Reason: "NodeStatusUnknown", Message: "Kubelet stopped posting node status."}
			b.refused(noRoom, 12*time.Minute)
		},
		"condition": func(b bound) {
			b.gpu1(v1alpha1.GPUCondition{Type: "DeviceNodeMissing", Message: "device node /dev/nvidia1 isn't there (nvidia-modprobe -u -c0 makes it)"})
		},
		"nothing": func(bound) {},
		"volume": func(b bound) {
			b.kubelets("FailedMount", `MountVolume.SetUp failed for volume "data": configmap "data" not found`, 12*time.Minute)
		},
		"mps-daemon": func(b bound) {
			b.waiting("ContainerCreating", "")
			b.Items[eventsPath] = []any{event(nodePlugin, "ResourceClaim", "team", "train-gpu", "c", "MPSDaemonFailed", "GPU GPU-00000002: MPS daemon x runs, and its clients may wait or fail: the control daemon has no MPS server and starts none", 12*time.Minute)}
		},
		"cdi": func(b bound) {
			b.waiting("CreateContainerError", "failed to generate spec: CDI device injection failed: unresolvable CDI devices k8s.gpu.nvidia.com/claim=u-gpu")
		},
		"image": func(b bound) { b.waiting("ImagePullBackOff", `Back-off pulling image "train:1"`) },
		"hook": func(b bound) {
			b.pod.Status.Phase = corev1.PodRunning
			b.waiting("CrashLoopBackOff", "back-off 40s restarting failed container").LastTerminationState.Terminated = &corev1.ContainerStateTerminated{
				Reason: "StartError", Message: "failed to create containerd task: OCI runtime create failed: error running createContainer hook #0: fork/exec /var/lib/tessera/bin/nvidia-cdi-hook: permission denied",
			}
		},
		"terminating": func(b bound) {
			b.pod.DeletionTimestamp = new(metav1.Now())
			e := stillInUse("gpu-00000002-mig-3g40gb-4", 5*time.Minute)
			e.InvolvedObject = corev1.ObjectReference{Kind: "ResourceClaim", Namespace: "team", Name: "train-gpu", UID: "c"}
			b.Items[eventsPath], b.Items[allEventsPath] = []any{e}, []any{e}
		},
		"forbidden": func(b bound) {
			b.Forbidden = []string{"/api/v1/nodes/node", eventsPath, inventoryPath}
			b.gpu1(prepareFailedCondition())
		},
		"forbidden-elsewhere": func(b bound) {
			b.Forbidden = []string{allEventsPath}
			b.refused(heldByAnother, 12*time.Minute)
		},
		"forbidden-claims": func(b bound) { b.Forbidden = []string{claimPath} },
		"rejected": func(b bound) {
			b.pod.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "UnexpectedAdmissionError", Message: "Pod was rejected: Allocate failed due to cannot allocate unregistered device nvidia.com/gpu, which is unexpected"}
		},
		"rejected-otherwise": func(b bound) {
			b.pod.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "OutOfcpu", Message: "Pod was rejected: Node didn't have enough resource: cpu, requested: 4000, used: 1000, capacity: 2000"}
		},
		"rejected-bare": func(b bound) {
			b.pod.OwnerReferences = nil
			b.pod.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "OutOfcpu", Message: "Pod was rejected: Node didn't have enough resource: cpu, requested: 4000, used: 1000, capacity: 2000"}
		},
		"failed": func(b bound) {
			b.pod.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "DeadlineExceeded", Message: "Pod was active on the node longer than the specified deadline"}
		},
		"running": func(b bound) { b.pod.Status.Phase = corev1.PodRunning },
	}
	all := make(map[string]kubectltest.Case)
	for name, change := range cases {
		all["why-"+name] = kubectltest.Case{Args: []string{"why", "train-0", "-n", "team"}, Change: func(s *kubectltest.Server) { change(newBound(s)) }}
	}
	kubectltest.Compare(t, Command, all)
}

// TestTextsOfNodes: what a node writes doesn't act on the terminal, and is exact as JSON.
func TestTextsOfNodes(t *testing.T) {
	const attack = "\x1b[2Jall is well\nnode-9: nothing is wrong"
	b := newBound(kubectltest.New(t))
	b.gpu1(v1alpha1.GPUCondition{Type: "Lost", Message: attack})
	b.refused(attack, time.Minute)
	if got := b.Run(t, Command, terminal.Screen{}, "", "why", "train-0", "-n", "team"); strings.Contains(got, "\x1b") || strings.Contains(got, "\nnode-9") {
		t.Errorf("it acts on the terminal, or passes for a line: %q", got)
	}
	var out Explanation
	if err := json.Unmarshal([]byte(b.Run(t, Command, terminal.Screen{}, "", "why", "train-0", "-n", "team", "-o", "json")), &out); err != nil || !out.Waits || len(out.Also) == 0 {
		t.Errorf("%+v, %v", out, err)
	}
}

// TestOtherSiliconIsRefused: a partition that the pod's GPU refuses doesn't concern a pod that has
// another one.
func TestOtherSiliconIsRefused(t *testing.T) {
	b := newBound(kubectltest.New(t))
	b.inventory.Status.GPUs[1].MIG = &v1alpha1.MIG{Profiles: []v1alpha1.MIGProfile{
		{Name: "3g.40gb", Placements: []v1alpha1.MIGPlacement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}},
	}}
	for start, concerns := range map[string]bool{"0": false, "4": true} {
		c := prepareFailedCondition()
		c.Refused = []string{"gpu-00000002-mig-3g40gb-" + start}
		b.gpu1(c)
		got := b.Run(t, Command, terminal.Screen{}, "", "why", "train-0", "-n", "team")
		if strings.Contains(got, "PrepareFailed") != concerns {
			t.Errorf("refused at slice %s: named: %t, want %t:\n%s", start, !concerns, concerns, got)
		}
	}
}

// TestAllocatedWithoutNode: of a pod without a node, why names the conditions of GPUs that its
// claims have.
func TestAllocatedWithoutNode(t *testing.T) {
	b := newBound(kubectltest.New(t))
	b.pod.Spec.NodeName = ""
	b.gpu1(prepareFailedCondition())
	b.Items[kubectltest.Resources+"resourceclaims"] = []any{*b.claim}
	got := b.Run(t, Command, terminal.Screen{}, "", "why", "train-0", "-n", "team")
	if !strings.HasPrefix(got, "All its claims have devices; it waits for something else: ") || !strings.Contains(got, "\n- GPU 1 of node node has the condition PrepareFailed: ") {
		t.Error(got)
	}
}
