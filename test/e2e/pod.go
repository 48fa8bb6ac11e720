//go:build e2e

package e2e

import (
	"context"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/test/stack"
)

// pod creates a pod with one container, main, that sleeps.
//
//	pod NAME [template=TEMPLATE | claim=CLAIM] [node=NODE] [stubborn]
//
// A stubborn pod doesn't end on SIGTERM.
func pod(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: pod NAME [template=TEMPLATE | claim=CLAIM] [node=NODE] [stubborn]")
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: args[0]},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](1),
			Containers: []corev1.Container{{
				Name: "main", Image: stack.TestImage, ImagePullPolicy: corev1.PullIfNotPresent,
				Command: []string{"sleep", "infinity"},
			}},
		},
	}
	for _, arg := range args[1:] {
		key, value, _ := strings.Cut(arg, "=")
		switch key {
		case "template":
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &value}}
		case "claim":
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &value}}
		case "node":
			p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: value}
		case "stubborn":
			p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](3)
			p.Spec.Containers[0].Command = []string{"sh", "-c", "trap '' TERM; while true; do sleep 1; done"}
		default:
			ts.Fatalf("pod: don't know %q", arg)
		}
	}
	if p.Spec.ResourceClaims != nil {
		p.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	}
	_, err := s.Kube().CoreV1().Pods(ts.Getenv("NS")).Create(context.Background(), p, metav1.CreateOptions{})
	ts.Check(err)
}
