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
//	pod [NAMESPACE/]NAME [template=TEMPLATE[,TEMPLATE...] | claim=CLAIM] [group=PODGROUP] [node=NODE] [userns] [stubborn | client | alone]
//
// A stubborn pod doesn't end on SIGTERM. An alone pod fails if the container of another
// alone pod of the story still runs on the node. A client is a CUDA program that uses
// its GPU all the time, and ends, with its container, when anything happens to
// it. A userns pod has a user namespace. All of a story's pods have the label story, which is the name of its
// namespace. In the pod, a claim from a template is named gpu, and another one as it is,
// because the kubelet of 1.34 reports the health of such claims only. Claims from further
// templates are named like these.
func pod(ts *testscript.TestScript, s *stack.Stack, neg bool, args []string) {
	createPod(ts, s, podOf(ts, neg, args))
}

// podOf returns the pod that a command describes.
func podOf(ts *testscript.TestScript, neg bool, args []string) *corev1.Pod {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: pod [NAMESPACE/]NAME [template=TEMPLATE[,TEMPLATE...] | claim=CLAIM] [group=PODGROUP] [node=NODE] [userns] [stubborn | client | alone]")
	}
	namespace, name := address(ts, args[0])
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"story": ts.Getenv("NS")}},
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
			for i, template := range strings.Split(value, ",") {
				claim := corev1.PodResourceClaim{Name: template, ResourceClaimTemplateName: &template}
				if i == 0 {
					claim.Name = "gpu"
				}
				p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, claim)
			}
		case "claim":
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: value, ResourceClaimName: &value}}
		case "group":
			p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &value}
		case "node":
			p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: value}
		case "userns":
			p.Spec.HostUsers = new(false)
		case "stubborn":
			p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](3)
			p.Spec.Containers[0].Command = []string{"sh", "-c", "trap '' TERM; while true; do sleep 1; done"}
		case "alone":
			alone(ts, p)
		case "client":
			p.Spec.Containers[0].Command = cudaProgram("--hold", "forever")
		default:
			ts.Fatalf("pod: don't know %q", arg)
		}
	}
	resources := &p.Spec.Containers[0].Resources
	for _, claim := range p.Spec.ResourceClaims {
		resources.Claims = append(resources.Claims, corev1.ResourceClaim{Name: claim.Name})
	}
	return p
}

func createPod(ts *testscript.TestScript, s *stack.Stack, p *corev1.Pod) {
	_, err := s.Kube().CoreV1().Pods(p.Namespace).Create(context.Background(), p, metav1.CreateOptions{})
	ts.Check(err)
}

// isAlone fails if a process has the pipe open for reading: then it can be opened for
// writing at once. Else it opens the pipe itself, until it ends.
const isAlone = `[ -p "$1" ] || mkfifo "$1"; timeout 2 sh -c ': > "$1"' sh "$1" && exit 1; exec sleep 1000000 <> "$1"`

// alone has the pod fail where another one is alone, and be it.
func alone(ts *testscript.TestScript, p *corev1.Pod) {
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	p.Spec.Volumes = []corev1.Volume{{Name: "locks", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: "/run/e2e-locks", Type: ptr.To(corev1.HostPathDirectoryOrCreate)},
	}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "locks", MountPath: "/locks"}}
	p.Spec.Containers[0].Command = []string{"sh", "-c", isAlone, "sh", "/locks/" + ts.Getenv("NS")}
}

// address splits "namespace/name"; the namespace is the story's where there is
// none.
func address(ts *testscript.TestScript, arg string) (namespace, name string) {
	if namespace, name, ok := strings.Cut(arg, "/"); ok {
		return namespace, name
	}
	return ts.Getenv("NS"), arg
}
