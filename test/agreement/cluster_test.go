//go:build agreement

package agreement

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/test/stack"
)

// check is the cluster and the pods on it.
type check struct {
	*stack.Stack
	tally

	program string // kubectl-gpu
	random  author
	// claims by their pod, running the pods that have a node.
	claims  map[string][]resourceapi.ResourceClaim
	running []string
}

const (
	namespace = "default"
	// claimSuffix is between a pod's name and the number of its claim.
	claimSuffix = "claim-"
	taintKey    = "example.com/agreement"
)

// publish has Tessera offer GPUs under the policies, and stops the kubelets.
func (c *check) publish(t *testing.T) {
	t.Helper()
	policies, err := os.ReadFile("policies.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Apply(t.Context(), namespace, policies); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"wait", "--for=condition=Applied", "--timeout=2m", "sharingpolicies", "--all"},
		{"label", "namespace", namespace, "resource.kubernetes.io/admin-access=true", "--overwrite"},
	} {
		if _, err := c.Kubectl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
	for _, node := range c.Cluster.Nodes() {
		if err := c.Cluster.Stop(t.Context(), node, "kubelet"); err != nil {
			t.Fatal(err)
		}
	}
}

// newPod writes a pod and its random claims.
func (c *check) newPod(name string) *corev1.Pod {
	var specs []resourceapi.ResourceClaimSpec
	for range pick(c.random, 1, 1, 1, 1, 2) {
		specs = append(specs, c.random.spec())
	}
	p := c.podOf(name, specs...)
	if c.random.one(5) {
		p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: pick(c.random, c.Cluster.Nodes()...)}
	}
	return p
}

// podOf writes a pod and its claims.
func (c *check) podOf(name string, specs ...resourceapi.ResourceClaimSpec) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	main := corev1.Container{Name: "main", Image: "registry.k8s.io/pause"}
	for i, spec := range specs {
		claim := resourceapi.ResourceClaim{
			TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaim"},
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint(name, ".", claimSuffix, i)},
			Spec:       spec,
		}
		c.claims[name] = append(c.claims[name], claim)
		of := corev1.PodResourceClaim{Name: fmt.Sprint(claimSuffix, i), ResourceClaimName: &claim.Name}
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, of)
		main.Resources.Claims = append(main.Resources.Claims, corev1.ResourceClaim{Name: of.Name})
	}
	p.Spec.Containers = []corev1.Container{main}
	p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}} // the kubelets are stopped
	return p
}

// create creates the claims before the pod, so that the scheduler sees the claims first.
func (c *check) create(t *testing.T, p *corev1.Pod) {
	t.Helper()
	for i := range c.claims[p.Name] {
		if _, err := c.Kube().ResourceV1().ResourceClaims(namespace).Create(t.Context(), &c.claims[p.Name][i], metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Kube().CoreV1().Pods(namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// delete removes a pod with its claims, and returns when they are gone.
func (c *check) delete(t *testing.T, name string) {
	t.Helper()
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
	pods, claims := c.Kube().CoreV1().Pods(namespace), c.Kube().ResourceV1().ResourceClaims(namespace)
	err := pods.Delete(t.Context(), name, now)
	for _, claim := range c.claims[name] {
		if err == nil {
			err = claims.Delete(t.Context(), claim.Name, metav1.DeleteOptions{})
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range c.claims[name] {
		until := time.Now().Add(time.Minute)
		for !apierrors.IsNotFound(err) {
			if time.Now().After(until) {
				t.Fatalf("claim %s stays: %v", claim.Name, err)
			}
			time.Sleep(20 * time.Millisecond)
			_, err = claims.Get(t.Context(), claim.Name, metav1.GetOptions{})
		}
		err = nil
	}
	c.running = slices.DeleteFunc(c.running, func(running string) bool { return running == name })
}

// taint moves a taint to a random device, or to all of a node, or takes it away.
func (c *check) taint(t *testing.T) {
	t.Helper()
	rules := c.Kube().ResourceV1().DeviceTaintRules()
	if err := rules.Delete(t.Context(), "agreement", metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	if c.random.one(3) {
		return
	}
	all, err := c.Kube().ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(all.Items, func(a, b resourceapi.ResourceSlice) int {
		return cmp.Or(cmp.Compare(a.Spec.Pool.Name, b.Spec.Pool.Name), cmp.Compare(a.Name, b.Name))
	})
	var devices [][2]string
	for i := range all.Items {
		for _, d := range all.Items[i].Spec.Devices {
			devices = append(devices, [2]string{all.Items[i].Spec.Pool.Name, d.Name})
		}
	}
	driver, chosen := gpu.DriverName, pick(c.random, devices...)
	r := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "agreement"}}
	r.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{Driver: &driver, Pool: &chosen[0], Device: &chosen[1]}
	if c.random.one(2) {
		r.Spec.DeviceSelector.Device = nil
	}
	r.Spec.Taint = resourceapi.DeviceTaint{Key: taintKey, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	if _, err := rules.Create(t.Context(), r, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}
