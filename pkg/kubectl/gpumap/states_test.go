package gpumap

import (
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"
)

// prepareFailed has a GPU that refuses partitions: those of 4 memory slices and more, and the
// whole GPU, are tainted.
func prepareFailed(s *kubectltest.Server) {
	kubectltest.Healthy(s)
	inv := s.Items[kubectltest.Own+"gpuinventories"][0].(v1alpha1.GPUInventory)
	inv.Status.GPUs[2].Conditions = []v1alpha1.GPUCondition{{
		Type: "PrepareFailed", Status: metav1.ConditionTrue, Message: "a claim could not be given gpu-00000003-mig-3g40gb-4: the GPU can't create a 3g.40gb partition: insufficient resources",
	}}
	for _, x := range s.Items[kubectltest.Resources+"resourceslices"] {
		devices := x.(resourceapi.ResourceSlice).Spec.Devices
		for i := range devices {
			d := &devices[i]
			if !strings.HasPrefix(d.Name, "gpu-00000003") {
				continue
			}
			d.Taints = nil // those of the condition that it had
			if d.Name == "gpu-00000003" || strings.Contains(d.Name, "3g40gb") || strings.Contains(d.Name, "4g40gb") {
				d.Taints = []resourceapi.DeviceTaint{{Key: gpu.TaintKey, Value: "PrepareFailed", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
			}
		}
	}
}

// oldTaint has rules of Kubernetes 1.34, which can select devices by class and expressions.
func oldTaint(s *kubectltest.Server) {
	rule := func(name string, selector map[string]any) any {
		taint := map[string]any{"key": "example.com/" + name, "effect": "NoSchedule"}
		return map[string]any{"metadata": map[string]any{"name": name}, "spec": map[string]any{"deviceSelector": selector, "taint": taint}}
	}
	s.Minor = "34"
	s.Items["/apis/resource.k8s.io/v1alpha3/devicetaintrules"] = []any{
		rule("device", map[string]any{"device": "gpu-00000002"}),
		rule("of-class", map[string]any{"deviceClassName": "mig.nvidia.com"}),
		rule("of-model", map[string]any{"selectors": []any{map[string]any{"cel": map[string]any{"expression": "false"}}}}),
	}
}
