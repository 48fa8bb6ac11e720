package stack

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Pod returns a pod whose container has a claim of the template, and runs the command or,
// without one, waits until it is told to end.
func Pod(name, template string, command ...string) *corev1.Pod {
	if len(command) == 0 {
		command = []string{"sh", "-c", "trap exit TERM; sleep infinity & wait"}
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: new(int64(1)),
			ResourceClaims:                []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}},
			Containers: []corev1.Container{{
				Name: "main", Image: TestImage, ImagePullPolicy: corev1.PullIfNotPresent, Command: command,
				Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}},
			}},
		},
	}
}
