//go:build integration

package test

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
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

// pluginInventories writes the same inventories as plugins and the controller of this release
// and of an earlier one do, while the CRD is of either release. The CRD of the earlier one has
// the field status.doubleAllocation, in whose place this one has a condition.
func pluginInventories(t *testing.T, s *server) {
	ctx, known := t.Context(), runtime.NewScheme()
	if err := v1alpha1.AddToScheme(known); err != nil {
		t.Fatal(err)
	}
	plugin, err := client.New(s.configAs("node", "node-c"), client.Options{Scheme: known})
	if err != nil {
		t.Fatal(err)
	}
	inv := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": "node-c"}}}
	inv.SetGroupVersionKind(schema.GroupVersionKind{Group: "gpu.tessera.dev", Version: "v1alpha1", Kind: "GPUInventory"})
	if err := plugin.Create(ctx, inv); err != nil {
		t.Fatal(err)
	}
	untouched := inv.DeepCopy()
	untouched.SetName("node-d")
	untouched.SetResourceVersion("")
	if err := s.admin.Create(ctx, untouched); err != nil {
		t.Fatal(err)
	}
	confirmed := client.RawPatch(types.MergePatchType, []byte(`{"status": {"doubleAllocation": {"kubernetes": "v1.36.3", "confirmed": true}}}`))
	has := func(want bool, objects ...*unstructured.Unstructured) {
		t.Helper()
		for _, o := range objects {
			if err := s.admin.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
				t.Fatal(err)
			}
			if got, _, _ := unstructured.NestedBool(o.Object, "status", "doubleAllocation", "confirmed"); got != want {
				t.Errorf("GPUInventory %s has the record: %v, want %v", o.GetName(), got, want)
			}
		}
	}
	// records writes a double allocation as the plugin of the earlier release does.
	records := func() {
		t.Helper()
		if err := s.admin.Get(ctx, client.ObjectKeyFromObject(inv), inv); err != nil {
			t.Fatal(err)
		}
		if err := unstructured.SetNestedMap(inv.Object, map[string]any{"kubernetes": "v1.36.3", "confirmed": true}, "status", "doubleAllocation"); err != nil {
			t.Fatal(err)
		}
		if err := plugin.Status().Update(ctx, inv); err != nil {
			t.Errorf("the earlier plugin writes its record: %v", err)
		}
	}
	// reports writes the status as the plugin of this release does.
	reports := func() {
		t.Helper()
		var now v1alpha1.GPUInventory
		if err := plugin.Get(ctx, client.ObjectKeyFromObject(inv), &now); err != nil {
			t.Fatal(err)
		}
		meta.SetStatusCondition(&now.Status.Conditions, metav1.Condition{
			Type: v1alpha1.ConditionDoubleAllocation, Status: metav1.ConditionTrue, Reason: v1alpha1.DoubleAllocationReason("v1.36.3-gke.100"),
		})
		now.Status.PublishResponse++
		if err := plugin.Status().Update(ctx, &now); err != nil {
			t.Fatal(err)
		}
		if !meta.IsStatusConditionTrue(now.Status.Conditions, v1alpha1.ConditionDoubleAllocation) {
			t.Error("the condition isn't stored")
		}
	}
	s.storesRecords(t, true, untouched)
	for _, o := range []*unstructured.Unstructured{inv, untouched} {
		if err := s.admin.Status().Patch(ctx, o, confirmed); err != nil {
			t.Fatal(err)
		}
	}
	has(true, inv, untouched)
	reports()
	has(false, inv) // the earlier controller sees no double allocation any more
	records()
	has(true, inv)

	s.storesRecords(t, false, untouched)
	has(false, inv, untouched)
	records() // which isn't stored
	reports()
	s.storesRecords(t, true, untouched)
	has(false, inv)
	has(true, untouched) // nothing has written it since: the earlier controller goes on as it was
	if s.storesRecords(t, false, untouched); t.Failed() {
		return
	}
	for _, o := range []*unstructured.Unstructured{inv, untouched} {
		if err := s.admin.Delete(ctx, o); err != nil {
			t.Error(err)
		}
	}
}

// storesRecords changes the CRD of GPUInventories to that of an earlier release, with
// status.doubleAllocation, or back, and waits until the server stores by it.
func (s *server) storesRecords(t *testing.T, stores bool, probe *unstructured.Unstructured) {
	t.Helper()
	ctx := t.Context()
	crd := &unstructured.Unstructured{}
	crd.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	if err := s.admin.Get(ctx, client.ObjectKey{Name: "gpuinventories.gpu.tessera.dev"}, crd); err != nil {
		t.Fatal(err)
	}
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	path := []string{"schema", "openAPIV3Schema", "properties", "status", "properties", "doubleAllocation"}
	version := versions[0].(map[string]any)
	if stores {
		record := map[string]any{"type": "object", "properties": map[string]any{
			"kubernetes": map[string]any{"type": "string"}, "confirmed": map[string]any{"type": "boolean"},
		}}
		if err := unstructured.SetNestedMap(version, record, path...); err != nil {
			t.Fatal(err)
		}
	} else {
		unstructured.RemoveNestedField(version, path...)
	}
	if err := unstructured.SetNestedSlice(crd.Object, versions, "spec", "versions"); err != nil {
		t.Fatal(err)
	}
	if err := s.admin.Update(ctx, crd); err != nil {
		t.Fatal(err)
	}
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		answer := probe.DeepCopy()
		dryRun := client.RawPatch(types.MergePatchType, []byte(`{"status": {"doubleAllocation": {"kubernetes": "probe"}}}`))
		err := s.admin.Status().Patch(ctx, answer, dryRun, client.DryRunAll)
		got, _, _ := unstructured.NestedString(answer.Object, "status", "doubleAllocation", "kubernetes")
		return (got == "probe") == stores, err
	})
	if err != nil {
		t.Fatalf("the server doesn't use the changed CRD: %v", err)
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
