package why

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// waitingPod makes a pod that waits, in namespace default, the server's only object.
func waitingPod(s *kubectltest.Server) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "waits", UID: "w"}}
	s.Objects = map[string]any{"/api/v1/namespaces/default/pods/waits": p}
	return p
}

// creationEvent returns an event about a claim that isn't created.
func creationEvent(about string, minute int, message string) corev1.Event {
	return corev1.Event{
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", UID: types.UID(about)}, Reason: uncreated, Message: "PodResourceClaim gpu: " + message,
		LastTimestamp: metav1.NewTime(time.Unix(int64(minute)*60, 0)),
	}
}

// TestWhyUncreated: why names the quota, or whatever else refuses the claim of a template,
// with the API server's words.
func TestWhyUncreated(t *testing.T) {
	const quota = `failed to create ResourceClaim: resourceclaims.resource.k8s.io "waits-gpu-x" is forbidden: ` +
		`exceeded quota: no-gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=0, limited: requests.nvidia.com/gpu=0`
	const events = "/api/v1/namespaces/default/events"
	const nothingKnown = "The claim gpu isn't created yet from the ResourceClaimTemplate one-gpu: check that the template exists in namespace default.\n"
	for name, tc := range map[string]struct {
		events    []any
		forbidden bool
		want      string
	}{
		"quota": {[]any{creationEvent("w", 2, quota), creationEvent("w", 1, "older"), creationEvent("other", 3, "another pod's")}, false,
			"Kubernetes can't create the claim gpu: " + quota + ".\n" +
				"Raise the ResourceQuota no-gpus in namespace default, or end pods there that have such devices; Kubernetes then tries again.\n"},
		"no template": {[]any{creationEvent("w", 1, `resourceclaimtemplate.resource.k8s.io "one-gpu" not found`)}, false,
			"Kubernetes can't create the claim gpu: resourceclaimtemplate.resource.k8s.io \"one-gpu\" not found.\n" +
				"Correct the ResourceClaimTemplate, or its name in the pod.\n"},
		"not tried": {[]any{creationEvent("other", 1, quota)}, false, nothingKnown},
		"forbidden": {nil, true, nothingKnown +
			"note: You may not list events in namespace default: whether Kubernetes tried to create the claim isn't known. " +
			"Ask for the verb list on them.\n"},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubectltest.New(t)
			waitingPod(s).Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("one-gpu")}}
			s.Items[events] = tc.events
			if tc.forbidden {
				s.Forbidden = []string{events}
			}
			if got := s.Run(t, Command, terminal.Screen{}, "", "why", "waits"); got != tc.want {
				t.Errorf("got\n%swant\n%s", got, tc.want)
			}
		})
	}
}

// TestWhyQuotaOfAnExtendedResource: why names the quota, too, that refuses the claim which
// the scheduler makes for an extended resource.
func TestWhyQuotaOfAnExtendedResource(t *testing.T) {
	s := kubectltest.New(t)
	p := waitingPod(s)
	p.Spec.Containers = make([]corev1.Container, 1)
	p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
	p.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
		Message: `running PreBind plugin "DynamicResources": create claim: forbidden: exceeded quota: no-gpus, requested: requests.nvidia.com/gpu=1`,
	}}
	gpus := kubectltest.Class("gpu.nvidia.com", "gpu")
	gpus.Spec.ExtendedResourceName = new("nvidia.com/gpu")
	s.Items[kubectltest.Resources+"deviceclasses"], s.Items[kubectltest.Resources+"resourceclaims"] = []any{gpus}, []any{}
	got := s.Run(t, Command, terminal.Screen{}, "", "why", "waits")
	if !strings.Contains(got, "exceeded quota: no-gpus") || !strings.HasSuffix(got, "\nRaise the ResourceQuota no-gpus in namespace default, "+
		"or end pods there that have such devices; Kubernetes then tries again.\n") {
		t.Error(got)
	}
}

// TestWhyDevicePlugin: why says whether a device plugin has the resource that the pod needs,
// besides the use of the driver's devices.
func TestWhyDevicePlugin(t *testing.T) {
	s := kubectltest.New(t)
	p := waitingPod(s)
	one := corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
	p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: one}}}
	gpus := kubectltest.Class("gpu.nvidia.com", "gpu")
	gpus.Spec.ExtendedResourceName = new("nvidia.com/gpu")
	s.Items[kubectltest.Resources+"deviceclasses"] = []any{gpus}
	plugins := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "old"}}
	plugins.Status.Allocatable = one
	s.Items["/api/v1/nodes"] = append(s.Items["/api/v1/nodes"], plugins)
	s.Items[kubectltest.Resources+"resourceclaims"] = append(s.Items[kubectltest.Resources+"resourceclaims"], kubectltest.Claim("lab", "last", "last-0", "gpu-00000003"))
	user := p.DeepCopy()
	user.Name, user.Spec.NodeName = "user", "old"

	s.Items["/api/v1/pods"] = []any{p, user}
	full := s.Run(t, Command, terminal.Screen{}, "", "why", "waits")
	const elsewhere = "\nNot looked at: 1 node: its device plugin has only 0 of 1 nvidia.com/gpu free.\n"
	if !strings.Contains(full, "It fits on node after the end of claim") || !strings.Contains(full, elsewhere) {
		t.Error(full)
	}
	s.Items["/api/v1/pods"] = []any{p}
	if free := s.Run(t, Command, terminal.Screen{}, "", "why", "waits"); !strings.HasPrefix(free, "A device plugin has what it needs, on old;") {
		t.Error(free)
	}
	s.Forbidden = []string{"/api/v1/pods"}
	hidden := s.Run(t, Command, terminal.Screen{}, "", "why", "waits")
	if !strings.Contains(hidden, "has 1 nvidia.com/gpu, and how many of them are free isn't known") ||
		!strings.Contains(hidden, "note: You may not list pods: how much device plugins have left isn't known.") {
		t.Error(hidden)
	}
}

// TestWhyCapacity: why names a capacity that no device has.
func TestWhyCapacity(t *testing.T) {
	s := kubectltest.New(t)
	c := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "share"}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1")}},
	}}}
	s.Items[kubectltest.Resources+"resourceclaims"] = append(s.Items[kubectltest.Resources+"resourceclaims"], c)
	waitingPod(s).Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("share")}}
	got := s.Run(t, Command, terminal.Screen{}, "", "why", "waits")
	if !strings.HasPrefix(got, "Request gpu asks for the capacity shares, which none of the 3 devices that match has; their capacities are ") {
		t.Error(got)
	}
}
