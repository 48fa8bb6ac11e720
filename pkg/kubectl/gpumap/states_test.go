package gpumap

import "github.com/tessera-dra/tessera/pkg/kubectl/kubectltest"

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
