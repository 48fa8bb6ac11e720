//go:build integration

package test

import (
	"context"
	"os"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// labels of Nodes are written with this field manager.
const labelOwner = "tessera-node-labels"

// applyLabels makes these the labels of a Node that labelOwner owns, as the controller does.
func applyLabels(ctx context.Context, c client.Client, node string, labels map[string]string, o ...client.ApplyOption) error {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	u.SetName(node)
	u.SetLabels(labels)
	return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), append(o, client.FieldOwner(labelOwner))...)
}

// removesLabels tries writes of a Node with the controller's token while controller.nodeLabels is
// off: nothing is allowed but to remove the labels that a controller wrote while it was on.
func removesLabels(t *testing.T, s *server) {
	const only = "the controller may only remove labels of nodes that it wrote"
	ctx, controller := t.Context(), s.as(t, "controller", "")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-labels", Labels: map[string]string{
		"nvidia.com/gpu.product": "theirs", "nvidia.com/gpu.present": "true", "zone": "a",
	}}}
	if err := s.admin.Create(ctx, node, client.FieldOwner("admin")); err != nil {
		t.Fatal(err)
	}
	if err := applyLabels(ctx, s.admin, node.Name, map[string]string{"nvidia.com/gpu.count": "2", "nvidia.com/gpu.present": "true"}); err != nil {
		t.Fatal(err)
	}
	for what, patch := range map[string]string{
		"add a label":                     `{"metadata": {"labels": {"nvidia.com/gpu.family": "hopper"}}}`,
		"change its own label":            `{"metadata": {"labels": {"nvidia.com/gpu.count": "8"}}}`,
		"remove another's label":          `{"metadata": {"labels": {"nvidia.com/gpu.product": null}}}`,
		"remove its own and another's":    `{"metadata": {"labels": {"nvidia.com/gpu.count": null, "nvidia.com/gpu.product": null}}}`,
		"remove a label of the cluster's": `{"metadata": {"labels": {"zone": null}}}`,
		"annotate":                        `{"metadata": {"annotations": {"stolen": "true"}}}`,
		"cordon":                          `{"spec": {"unschedulable": true}}`,
		"forget who wrote what":           `{"metadata": {"managedFields": [{}]}}`,
	} {
		t.Run(what, func(t *testing.T) {
			denied(t, only, func(ctx context.Context) error {
				return controller.Patch(ctx, node.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)), client.DryRunAll)
			})
		})
	}
	for what, labels := range map[string]map[string]string{
		"add a label by apply":                 {"nvidia.com/gpu.count": "2", "nvidia.com/gpu.present": "true", "nvidia.com/gpu.family": "hopper"},
		"become an owner of another's label":   {"nvidia.com/gpu.product": "theirs"},
		"take over another's label by force":   {"nvidia.com/gpu.product": "mine"},
		"take over a label of the cluster's":   {"zone": "a"},
		"keep one of its own, and remove none": {"nvidia.com/gpu.count": "2"},
	} {
		t.Run(what, func(t *testing.T) {
			denied(t, only, func(ctx context.Context) error {
				return applyLabels(ctx, controller, node.Name, labels, client.ForceOwnership, client.DryRunAll)
			})
		})
	}
	if err := applyLabels(ctx, controller, node.Name, nil); err != nil {
		t.Errorf("remove its own labels: %v", err)
	}
	if err := s.admin.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil {
		t.Fatal(err)
	}
	if l := node.Labels; len(l) != 3 || l["nvidia.com/gpu.product"] != "theirs" || l["nvidia.com/gpu.present"] != "true" || l["zone"] != "a" {
		t.Errorf("the node has the labels %v, want those that the admin wrote", l)
	}
	if err := applyLabels(ctx, controller, node.Name, nil); err != nil {
		t.Errorf("remove them again: %v", err)
	}
}

// notesOnLabels checks that the notes have the command of the documents that removes the labels.
func notesOnLabels(t *testing.T, s *server) {
	out, err := s.helm("upgrade", "tessera", chart, "--namespace=tessera", "--dry-run=server", "--reuse-values")
	if err != nil {
		t.Fatalf("helm upgrade --dry-run=server: %v\n%s", err, out)
	}
	page, err := os.ReadFile("../../../docs/user/install.md")
	if err != nil {
		t.Fatal(err)
	}
	_, command, _ := strings.Cut(string(page), "$ kubectl get nodes -l nvidia.com/gpu.present")
	command, _, found := strings.Cut(command, "\n```")
	if !found || !strings.Contains(strings.Join(strings.Fields(out), " "), strings.Join(strings.Fields(command), " ")) {
		t.Errorf("the notes don't have the command %q:\n%s", command, out)
	}
}

// failsToRemoveLabels uninstalls a release with node labels while no Job can run. The rights of
// the Job must be gone. Without the option there is no Job to wait for.
func failsToRemoveLabels(t *testing.T, s *server) {
	const name = "tessera-remove-node-labels"
	s.install(t, "--set=controller.nodeLabels.enabled=true")
	if out, err := s.helm("uninstall", "tessera", "--namespace", "tessera", "--timeout=5s"); err == nil {
		t.Fatalf("helm uninstall succeeded, and there is nothing that runs Jobs:\n%s", out)
	}
	for _, kind := range []string{"ClusterRole", "ClusterRoleBinding"} {
		object := &metav1.PartialObjectMetadata{}
		object.SetGroupVersionKind(schema.GroupVersionKind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: kind})
		if err := s.admin.Get(t.Context(), types.NamespacedName{Name: name}, object); !apierrors.IsNotFound(err) {
			t.Errorf("get %s %s: %v, want it deleted", kind, name, err)
		}
	}
	job := &batchv1.Job{}
	if err := s.admin.Get(t.Context(), types.NamespacedName{Namespace: "tessera", Name: name}, job); err != nil || job.Spec.TTLSecondsAfterFinished == nil {
		t.Errorf("the Job stays for its logs until it is deleted by itself: %v", err)
	}
	s.install(t)
	s.mustHelm(t, "uninstall", "tessera", "--namespace", "tessera", "--timeout=5s")

	rendered := []string{"template", "tessera", chart, "--namespace=tessera", "--dry-run=server", "--set=image.repository=registry.example.com/tessera,controller.nodeLabels.enabled=true"}
	for _, c := range []struct {
		args []string
		want bool
	}{{nil, true}, {[]string{"--no-hooks"}, false}} {
		out, err := s.helm(append(rendered, c.args...)...)
		if err != nil || strings.Contains(out, "kind: Job\n") != c.want {
			t.Errorf("helm template --dry-run=server %s: %v, want a Job: %t\n%s", c.args, err, c.want, out)
		}
	}
}
