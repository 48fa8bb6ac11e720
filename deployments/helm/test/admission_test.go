//go:build integration

package test

import (
	"context"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/sim/cluster/platform"
)

// TestPlatformAdmission applies the admission policies of platforms that have some to a
// server, and asks them about the chart's pods and about others.
func TestPlatformAdmission(t *testing.T) {
	for name, check := range map[string]func(*testing.T, *server){
		"openshift": openshiftAdmits, "gke-autopilot": autopilotRefuses, "aks-enforce": safeguardsAdmit,
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t)
			if err := s.admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "tessera"}}); err != nil {
				t.Fatal(err)
			}
			s.create(t, platformOf(t, name).Cluster.Objects, nil)
			check(t, s)
		})
	}
}

func platformOf(t *testing.T, name string) *platform.Platform {
	t.Helper()
	p, err := platform.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// create creates the objects of a text, or those of them with a kind that is wanted.
func (s *server) create(t *testing.T, text string, wanted func(kind string) bool) {
	t.Helper()
	for _, object := range objects(t, text) {
		if wanted != nil && !wanted(object.GetKind()) {
			continue
		}
		if err := s.admin.Create(t.Context(), object); err != nil {
			t.Fatalf("%s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
}

// chartPods renders the chart and returns its text, and its pods by their accounts. They have no
// priority class: the server has no controller that works out quotas.
func chartPods(t *testing.T) (rendered string, pods map[string]*corev1.Pod) {
	t.Helper()
	rendered, all, err := template(t, "--set=controller.priorityClassName=,node.priorityClassName=,mps.priorityClassName=")
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, all)
	}
	pods = map[string]*corev1.Pod{}
	for _, object := range objects(t, rendered) {
		spec, found, err := unstructured.NestedMap(object.Object, "spec", "template", "spec")
		if err != nil {
			t.Fatal(err)
		}
		if !found {
			continue
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "tessera", GenerateName: object.GetName() + "-"}}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(spec, &pod.Spec); err != nil {
			t.Fatal(err)
		}
		pods[pod.Spec.ServiceAccountName] = pod
	}
	if len(pods) < 3 {
		t.Fatalf("pods of only %d accounts", len(pods))
	}
	return rendered, pods
}

func (s *server) tryPod(ctx context.Context, pod *corev1.Pod) error {
	return s.admin.Create(ctx, pod.DeepCopy(), client.DryRunAll)
}

// admitted waits until a pod is admitted: rights count a moment after they are there.
func (s *server) admitted(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		last = s.tryPod(ctx, pod)
		return last == nil, nil
	})
	if err != nil {
		t.Errorf("%s: %v", pod.GenerateName, last)
	}
}

func userPod(image string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "user-"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: image}}},
	}
}

// openshiftAdmits checks that the rights in the chart let its privileged pods in, which are
// refused without them, and that a user's pod gets a user ID of its namespace.
func openshiftAdmits(t *testing.T, s *server) {
	rendered, pods := chartPods(t)
	const refusal = "unable to validate against any security context constraint: [provider restricted-v2: "
	for _, account := range []string{"tessera-node", "tessera-mps"} {
		denied(t, refusal, func(ctx context.Context) error { return s.tryPod(ctx, pods[account]) })
	}
	s.admitted(t, pods["tessera-controller"])
	root := userPod("debian")
	root.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsUser: new(int64)}
	denied(t, refusal+".containers[0].runAsUser: ", func(ctx context.Context) error { return s.tryPod(ctx, root) })
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		plain := userPod("debian")
		if err := s.admin.Create(ctx, plain, client.DryRunAll); err != nil {
			return false, err
		}
		return plain.Spec.SecurityContext.RunAsUser != nil && *plain.Spec.SecurityContext.RunAsUser == 1000650000, nil
	})
	if err != nil {
		t.Errorf("a user's pod gets no user ID: %v", err)
	}
	s.create(t, rendered, func(kind string) bool { return strings.HasPrefix(kind, "Role") })
	for _, pod := range pods {
		s.admitted(t, pod)
	}
}

// autopilotRefuses checks that helm install fails with what the profile says.
func autopilotRefuses(t *testing.T, s *server) {
	_, pods := chartPods(t)
	const refusal = "GKE Warden rejected the request because it violates one or more constraints. Violations details: {\"[denied by autogke-"
	denied(t, refusal, func(ctx context.Context) error { return s.tryPod(ctx, pods["tessera-node"]) })
	s.admitted(t, pods["tessera-controller"])
	out, err := s.helm("install", "tessera", chart, "--namespace", "tessera", "--set=image.repository=registry.example.com/tessera")
	if err == nil || !regexp.MustCompile(platformOf(t, "gke-autopilot").Use.Message).MatchString(out) {
		t.Errorf("helm install: error %v:\n%s", err, out)
	}
}

// safeguardsAdmit checks that the chart's pods have what deployment safeguards want, and that
// others are refused.
func safeguardsAdmit(t *testing.T, s *server) {
	noTag, latest, lazy := userPod("localhost:5000/debian"), userPod("debian:latest"), userPod("debian:13")
	for _, pod := range []*corev1.Pod{noTag, latest} {
		main := &pod.Spec.Containers[0]
		main.LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
		main.ReadinessProbe = main.LivenessProbe
		main.Resources.Requests = corev1.ResourceList{
			corev1.ResourceCPU: apiresource.MustParse("100m"), corev1.ResourceMemory: apiresource.MustParse("100Mi"),
		}
		denied(t, "Please specify an explicit, versioned image tag", func(ctx context.Context) error { return s.tryPod(ctx, pod) })
	}
	denied(t, `> has no <livenessProbe>. Required probes: ["readinessProbe", "livenessProbe"]`,
		func(ctx context.Context) error { return s.tryPod(ctx, lazy) })
	rendered, pods := chartPods(t)
	for _, pod := range pods {
		s.admitted(t, pod)
	}
	for _, object := range objects(t, rendered) {
		if kind := object.GetKind(); kind == "DaemonSet" || kind == "Deployment" {
			if err := s.admin.Create(t.Context(), object, client.DryRunAll); err != nil {
				t.Errorf("%s %s: %v", kind, object.GetName(), err)
			}
		}
	}
	out, all, err := template(t, "--set=controller.replicas=2", "--show-only=templates/controller/deployment.yaml")
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, all)
	}
	for _, object := range objects(t, out) {
		if err := s.admin.Create(t.Context(), object, client.DryRunAll); err != nil {
			t.Errorf("two replicas of the controller: %v", err)
		}
	}
}
