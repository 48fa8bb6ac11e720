//go:build integration

package test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// denied waits until act is forbidden with these words, or a field of it is: a policy
// takes effect a moment after it is there.
func denied(t *testing.T, want string, act func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 100*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		last = act(ctx)
		return (apierrors.IsForbidden(last) || apierrors.IsInvalid(last)) && strings.Contains(last.Error(), want), nil
	})
	if err != nil {
		t.Errorf("got %v, want it forbidden with %q", last, want)
	}
}

func slice(name, of string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: of, NodeName: new("node-a"),
			Pool:    resourceapi.ResourcePool{Name: "node-a", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "device"}},
		},
	}
}

func controllerSlices(t *testing.T, s *server) {
	const only = "the controller may write ResourceSlices of the driver gpu.nvidia.com only"
	ctx, controller := t.Context(), s.as(t, "controller", "")
	theirs := slice("theirs", "gpu.example.com")
	if err := s.admin.Create(ctx, theirs); err != nil {
		t.Fatal(err)
	}
	denied(t, only, func(ctx context.Context) error {
		return controller.Create(ctx, slice("new", "gpu.example.com"), client.DryRunAll)
	})
	denied(t, only, func(ctx context.Context) error {
		change := theirs.DeepCopy()
		change.Spec.Devices = nil
		return controller.Update(ctx, change, client.DryRunAll)
	})
	denied(t, only, func(ctx context.Context) error { return controller.Delete(ctx, theirs.DeepCopy()) })
	ours := slice("ours", driver)
	if err := controller.Create(ctx, ours); err != nil {
		t.Fatalf("create a slice of its own driver: %v", err)
	}
	ours.Spec.Pool.Generation++
	if err := controller.Update(ctx, ours); err != nil {
		t.Errorf("update a slice of its own driver: %v", err)
	}
	if err := controller.Delete(ctx, ours); err != nil {
		t.Errorf("delete a slice of its own driver: %v", err)
	}
}

func controllerClasses(t *testing.T, s *server) {
	const only = "the controller may write only DeviceClasses that its ClusterRole owns"
	ctx, controller := t.Context(), s.as(t, "controller", "")
	class := func(name, role string) *resourceapi.DeviceClass {
		return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{"app.kubernetes.io/managed-by": "tessera"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole", Name: role, UID: "1"}},
		}}
	}
	labelled := class("labelled", "")
	labelled.OwnerReferences = nil
	for _, theirs := range []*resourceapi.DeviceClass{labelled, class("theirs", "another-controller")} {
		denied(t, only, func(ctx context.Context) error { return controller.Create(ctx, theirs.DeepCopy(), client.DryRunAll) })
		if err := s.admin.Create(ctx, theirs); err != nil {
			t.Fatal(err)
		}
		denied(t, only, func(ctx context.Context) error {
			change := theirs.DeepCopy()
			change.OwnerReferences = class("", "tessera-controller").OwnerReferences
			return controller.Update(ctx, change, client.DryRunAll)
		})
		denied(t, only, func(ctx context.Context) error { return controller.Delete(ctx, theirs.DeepCopy()) })
	}
	ours := class("ours", "tessera-controller")
	if err := controller.Create(ctx, ours); err != nil {
		t.Fatalf("create a class of its own: %v", err)
	}
	ours.Annotations = map[string]string{"changed": "true"}
	if err := controller.Update(ctx, ours); err != nil {
		t.Errorf("update a class of its own: %v", err)
	}
	if err := controller.Delete(ctx, ours); err != nil {
		t.Errorf("delete a class of its own: %v", err)
	}
}

// allocated creates a claim that has one device of a node.
func allocated(t *testing.T, s *server, name, node string) *resourceapi.ResourceClaim {
	t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: driver}}}
	if err := s.admin.Create(t.Context(), claim); err != nil {
		t.Fatal(err)
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "gpu", Driver: driver, Pool: node, Device: "gpu-0"},
		}},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}},
		}},
	}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "1"}}
	if err := s.admin.Status().Update(t.Context(), claim); err != nil {
		t.Fatal(err)
	}
	return claim
}

func pluginStatuses(t *testing.T, s *server) {
	ctx, claim := t.Context(), allocated(t, s, "claim", "node-a")
	patch := func(c client.Client, status string) error {
		return c.Status().Patch(ctx, claim.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"status": `+status+`}`)))
	}
	const device = `{"devices": [{"driver": "gpu.nvidia.com", "pool": "node-a", "device": "gpu-0", "data": {"uuid": "GPU-1"}}]}`
	own, other := s.as(t, "node", "node-a"), s.as(t, "node", "node-b")
	denied(t, `the plugin of node "node-b" may report only devices of its own node`, func(context.Context) error { return patch(other, device) })
	for _, status := range []string{
		`{"reservedFor": null}`,
		`{"reservedFor": [{"resource": "pods", "name": "another", "uid": "2"}]}`,
		`{"allocation": null, "reservedFor": null, "devices": null}`,
	} {
		denied(t, "the plugin may write status.devices only", func(context.Context) error { return patch(own, status) })
	}
	if err := patch(own, device); err != nil {
		t.Errorf("status.devices of its own node: %v", err)
	}
}

// pluginInventories has a plugin report a double allocation, the controller confirm
// it, and the plugin write its status again.
func pluginInventories(t *testing.T, s *server) {
	ctx := t.Context()
	one := map[string]any{"namespace": "default", "name": "a", "uid": "1", "device": "gpu-00000000"}
	double := func(confirmed bool) map[string]any {
		return map[string]any{"holder": one, "refused": one, "refusedAt": "2026-01-01T00:00:00Z", "confirmed": confirmed}
	}
	inv := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": "node-c"}}}
	inv.SetGroupVersionKind(schema.GroupVersionKind{Group: "gpu.tessera.dev", Version: "v1alpha1", Kind: "GPUInventory"})
	plugin := s.as(t, "node", "node-c")
	if err := plugin.Create(ctx, inv); err != nil {
		t.Fatal(err)
	}
	write := func(change func(status map[string]any)) error {
		if err := s.admin.Get(ctx, client.ObjectKeyFromObject(inv), inv); err != nil {
			t.Fatal(err)
		}
		status, _, _ := unstructured.NestedMap(inv.Object, "status")
		if status == nil {
			status = make(map[string]any)
		}
		change(status)
		inv.Object["status"] = status
		return plugin.Status().Update(ctx, inv)
	}
	reports := func(d any) func(map[string]any) {
		return func(status map[string]any) { status["doubleAllocation"] = d }
	}
	denied(t, "the plugin may not confirm a double allocation", func(context.Context) error { return write(reports(double(true))) })
	if err := write(reports(double(false))); err != nil {
		t.Fatalf("report one: %v", err)
	}
	denied(t, "the plugin may not confirm a double allocation", func(context.Context) error { return write(reports(double(true))) })
	confirm := []byte(`{"status": {"doubleAllocation": {"confirmed": true}}}`)
	if err := s.as(t, "controller", "").Status().Patch(ctx, inv, client.RawPatch(types.MergePatchType, confirm)); err != nil {
		t.Fatalf("the controller confirms it: %v", err)
	}
	if err := write(func(status map[string]any) { status["driverVersion"] = "580.1" }); err != nil {
		t.Errorf("write something else beside it: %v", err)
	}
	changed := double(true)
	changed["kubernetes"] = "v1.37.1"
	denied(t, "the plugin may not confirm a double allocation", func(context.Context) error { return write(reports(changed)) })
	if err := write(reports(double(false))); err != nil {
		t.Errorf("replace it: %v", err)
	}
	if err := s.admin.Delete(ctx, inv); err != nil {
		t.Error(err)
	}
}

func pluginReads(t *testing.T, s *server) {
	plugin := s.as(t, "node", "node-a")
	for _, kind := range []string{"Pod", "Secret", "ConfigMap", "Node"} {
		object := &unstructured.Unstructured{}
		object.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: kind})
		key := types.NamespacedName{Namespace: "default", Name: "any"}
		if kind == "Node" {
			key.Namespace = ""
		}
		if err := plugin.Get(t.Context(), key, object); !apierrors.IsForbidden(err) {
			t.Errorf("get a %s: %v, want it forbidden", kind, err)
		}
	}
}

// repeatsLabelRemoval turns node labels off while no Job can run. The rights of the
// failed Job must be gone, and the next upgrade must try again.
func repeatsLabelRemoval(t *testing.T, s *server) {
	const name = "tessera-remove-node-labels"
	fails := func(args ...string) {
		t.Helper()
		if out, err := s.helm(args...); err == nil {
			t.Fatalf("helm %s succeeded, and there is nothing that runs Jobs:\n%s", strings.Join(args, " "), out)
		}
		for _, kind := range []string{"ClusterRole", "ClusterRoleBinding"} {
			object := &metav1.PartialObjectMetadata{}
			object.SetGroupVersionKind(schema.GroupVersionKind{Group: "rbac.authorization.k8s.io", Version: "v1", Kind: kind})
			if err := s.admin.Get(t.Context(), types.NamespacedName{Name: name}, object); !apierrors.IsNotFound(err) {
				t.Errorf("after helm %s, get %s %s: %v, want it deleted", args[0], kind, name, err)
			}
		}
	}
	job := func() types.UID {
		t.Helper()
		object := &batchv1.Job{}
		if err := s.admin.Get(t.Context(), types.NamespacedName{Namespace: "tessera", Name: name}, object); err != nil {
			t.Fatal(err)
		}
		return object.UID
	}
	upgrade := []string{"upgrade", "tessera", chart, "--namespace", "tessera", "--set=image.repository=registry.example.com/tessera", "--timeout=5s"}
	s.install(t, "--set=controller.nodeLabels.enabled=true")
	fails(upgrade...)
	first := job()
	fails(upgrade...)
	if job() == first {
		t.Error("the second upgrade didn't try again to remove the labels")
	}
	s.install(t, "--set=controller.nodeLabels.enabled=true")
	fails("uninstall", "tessera", "--namespace", "tessera", "--timeout=5s")
	second := job()
	fails(slices.Insert(slices.Clone(upgrade), 1, "--install")...)
	if job() == second {
		t.Error("the install after an uninstall that failed didn't try to remove the labels")
	}
}
