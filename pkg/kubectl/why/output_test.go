package why

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// TestOutput compares the output of the command with testdata.
func TestOutput(t *testing.T) {
	kubectltest.Compare(t, Command, map[string]kubectltest.Case{
		"why-no-pod": {Args: []string{"why"}},
	})
}

// TestHelpIsTrue: the run that the help shows is one.
func TestHelpIsTrue(t *testing.T) {
	kubectltest.CompareHelp(t, Command, kubectltest.Case{Change: oneWaits})
}

// oneWaits has a pod that waits for a whole GPU.
func oneWaits(s *kubectltest.Server) {
	c := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train-1-gpu", UID: "w"}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "gpu.nvidia.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
	}}}
	s.Items[kubectltest.Resources+"resourceclaims"] = append(s.Items[kubectltest.Resources+"resourceclaims"], c)
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "train-1", UID: "p"}}
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("train-1-gpu")}}
	s.Objects = map[string]any{"/api/v1/namespaces/team/pods/train-1": p}
}
