package fit_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
)

// TestExtendedResources: an init container that ends can have the devices of containers
// that start after it, and not those of sidecars before it.
func TestExtendedResources(t *testing.T) {
	const name = "example.com/gpu"
	all := classes()[:1]
	all[0].Spec.ExtendedResourceName = new(name)
	j := fit.NewJudge(fit.Objects{Classes: all})
	has := func(n string) corev1.Container {
		return corev1.Container{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{name: resource.MustParse(n)}}}
	}
	sidecar := func(n string) corev1.Container {
		c := has(n)
		c.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
		return c
	}
	for title, tc := range map[string]struct {
		init []corev1.Container
		main []corev1.Container
		want int64
	}{
		"containers":                   {nil, []corev1.Container{has("1"), has("2")}, 3},
		"a larger init container":      {[]corev1.Container{has("4"), has("2")}, []corev1.Container{has("3")}, 4},
		"a sidecar before it":          {[]corev1.Container{sidecar("1"), has("2")}, []corev1.Container{has("1")}, 3},
		"a sidecar after it":           {[]corev1.Container{has("2"), sidecar("1")}, []corev1.Container{has("1")}, 2},
		"a sidecar between two":        {[]corev1.Container{has("3"), sidecar("1"), has("3")}, []corev1.Container{has("1")}, 4},
		"only an init container's":     {[]corev1.Container{has("2")}, []corev1.Container{{}}, 2},
		"a sidecar before a small one": {[]corev1.Container{sidecar("1"), has("1")}, []corev1.Container{has("1")}, 2},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{InitContainers: tc.init, Containers: tc.main}}
		got := j.ClaimsOf(pod, nil).Waiting
		if len(got) != 1 || len(got[0].Spec.Devices.Requests) != 1 || got[0].Spec.Devices.Requests[0].Exactly.Count != tc.want {
			t.Errorf("%s: %+v, want one request for %d", title, got, tc.want)
		}
	}
}
