//go:build integration

package control_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// foreign makes what NVIDIA's driver publishes for a node: one slice in a pool
// that is named after the node, owned by the Node, with a random name.
func (n *node) foreign(t *testing.T, generation int64) *resourceapi.ResourceSlice {
	t.Helper()
	s := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName:    n.name + "-gpu.nvidia.com-",
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.name, UID: n.uid, Controller: new(true)}},
		},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: &n.name,
			Pool:    resourceapi.ResourcePool{Name: n.name, Generation: generation, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: new("gpu")}}}},
		},
	}
	s, err := slices.Create(t.Context(), s, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The other driver was uninstalled a moment ago. Its slices have the node's pool,
// and of whatever generation they are, they would break it.
func TestSlicesThatAnotherDriverLeft(t *testing.T) {
	for name, generation := range map[string]int64{"older": 0, "same": 1, "newer": 7} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 2)
			left := n.foreign(t, generation)
			startController(t)
			n.report(t)
			n.startPlugin(t)
			n.waitForPool(t, 2)
			if _, err := slices.Get(t.Context(), left.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("it is still there: %v", err)
			}
		})
	}
}

// The other driver is installed on a node whose plugin is gone: its slices are
// alone there.
func TestTheWayBackToAnotherDriver(t *testing.T) {
	startController(t)
	n, kill := newPublishedNode(t, 2)
	kill()
	theirs := n.foreign(t, 1)
	eventually(t, "only theirs is there", func() bool {
		pool := n.pool(t)
		return len(pool) == 1 && pool[0].UID == theirs.UID
	})
	somethingElseHappens(t)
	if pool := n.pool(t); len(pool) != 1 || pool[0].UID != theirs.UID {
		t.Errorf("%d slices are there", len(pool))
	}
}

// Both drivers run: theirs writes its slice again whenever it is deleted.
func TestAnotherDriverThatRuns(t *testing.T) {
	startController(t)
	n, _ := newPublishedNode(t, 2)
	theirs := n.foreign(t, 1)
	writes := 1
	gone := func() bool {
		_, err := slices.Get(t.Context(), theirs.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	}
	conflicting := func() bool {
		if gone() {
			theirs = n.foreign(t, 2)
			writes++
		}
		c := meta.FindStatusCondition(n.inventory(t).Status.Conditions, v1alpha1.ConditionConflicting)
		return c != nil && c.Status == metav1.ConditionTrue && c.Reason == v1alpha1.ReasonForeignSlices && strings.Contains(c.Message, n.name+"-gpu.nvidia.com-")
	}
	eventually(t, "the conflict is told", conflicting)
	eventually(t, "only theirs is there", func() bool {
		pool := n.pool(t)
		return len(pool) == 1 && pool[0].UID == theirs.UID
	})
	somethingElseHappens(t)
	if gone() || writes > 2 {
		t.Errorf("the other driver had to write %d times", writes)
	}
}

// Without its definition there is no inventory of any node: that isn't a
// cluster without GPUs.
func TestDefinitionsAreRemoved(t *testing.T) {
	anotherServer(t, binaries)
	stop := startController(t)
	n := newNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	before := n.waitForPool(t, 2)
	for _, kind := range []string{"sharingpolicies", "gpuinventories"} {
		definition := &unstructured.Unstructured{}
		definition.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
		definition.SetName(kind + ".gpu.tessera.dev")
		if err := api.Delete(t.Context(), definition); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the definition of "+kind+" is gone", func() bool {
			return apierrors.IsNotFound(api.Get(t.Context(), client.ObjectKeyFromObject(definition), definition))
		})
	}
	// The controller sees a slice of the node change, and looks at the node.
	touched := before[0].DeepCopy()
	touched.Annotations = map[string]string{"touched": "yes"}
	if _, err := slices.Update(t.Context(), touched, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the controller says what is missing", func() bool {
		return strings.Contains(controllerLog(), "its CustomResourceDefinition is missing or being deleted")
	})
	stop()
	if pool := n.pool(t); len(pool) != len(before) {
		t.Errorf("%d slices are left, want %d", len(pool), len(before))
	}
}

// Any kubelet may create a slice of the name that the controller's question to
// the server has.
func TestSliceOfTheProbesName(t *testing.T) {
	createSlice(t, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "tessera-probe"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "other.example.com", NodeName: new("elsewhere"), Pool: resourceapi.ResourcePool{Name: "elsewhere", ResourceSliceCount: 1},
		},
	})
	startController(t)
	newPublishedNode(t, 1)
}

// The controller is replaced while a policy is refused: the accepted version
// stays in force.
func TestAcceptedFormSurvivesControllers(t *testing.T) {
	stop := startController(t)
	n, _ := newPublishedNode(t, 1)
	p := newPolicy(t, v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 3}})
	p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"story": "accepted"}}
	if err := api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	label(t, n.name, "story", "accepted")
	replicas := func() int {
		count := 0
		for _, s := range n.pool(t) {
			for _, d := range s.Spec.Devices {
				if gpu.DeviceName(d.Name).IsReplica() {
					count++
				}
			}
		}
		return count
	}
	eventually(t, "three replicas", func() bool { return replicas() == 3 })
	applied := func(want metav1.ConditionStatus, reason string) func() bool {
		return func() bool {
			if err := api.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
				t.Fatal(err)
			}
			c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionApplied)
			return c != nil && c.Status == want && c.Reason == reason && c.ObservedGeneration == p.Generation
		}
	}
	eventually(t, "it is applied", applied(metav1.ConditionTrue, v1alpha1.ReasonApplied))
	change(t, p, func() { p.Spec.GPUSelector = "device.attributes[" })
	eventually(t, "it isn't applied", applied(metav1.ConditionFalse, v1alpha1.ReasonInvalid))
	stop()
	startController(t)
	somethingElseHappens(t)
	if got := replicas(); got != 3 {
		t.Errorf("%d replicas are offered, want 3", got)
	}
}

func label(t *testing.T, node, key, value string) {
	t.Helper()
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, key, value))
	if err := api.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, patch); err != nil {
		t.Fatal(err)
	}
}

// The server refuses objects that it can validate itself.
func TestServerRefusesWhatCannotBeMeant(t *testing.T) {
	expressions := func(all ...any) map[string]any {
		return map[string]any{"plan": map[string]any{"exclusive": map[string]any{}}, "nodeSelector": map[string]any{"matchExpressions": all}}
	}
	for name, tc := range map[string]struct {
		kind string
		spec map[string]any
		ok   bool
	}{
		"selector":             {"SharingPolicy", expressions(map[string]any{"key": "a", "operator": "In", "values": []any{"b"}}, map[string]any{"key": "c", "operator": "Exists"}), true},
		"operator":             {"SharingPolicy", expressions(map[string]any{"key": "a", "operator": "Equals", "values": []any{"b"}}), false},
		"no values":            {"SharingPolicy", expressions(map[string]any{"key": "a", "operator": "In"}), false},
		"values for existence": {"SharingPolicy", expressions(map[string]any{"key": "a", "operator": "Exists", "values": []any{"b"}}), false},
		"uuid":                 {"GPUInventory", map[string]any{"gpus": []any{map[string]any{"uuid": "GPU-980fb007-8a10-0135-bada-13f71feaef21", "timeSlice": "Long"}}}, true},
		"no uuid":              {"GPUInventory", map[string]any{"gpus": []any{map[string]any{"uuid": "0000:07:00.0", "timeSlice": "Long"}}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			u := &unstructured.Unstructured{Object: map[string]any{"spec": tc.spec}}
			u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(tc.kind))
			u.SetGenerateName("odd-")
			err := api.Create(t.Context(), u)
			t.Cleanup(func() { _ = api.Delete(context.Background(), u) })
			if tc.ok && err != nil || !tc.ok && !apierrors.IsInvalid(err) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// No node has thousands of GPUs, whatever its plugin writes.
func TestServerRefusesTooManyGPUs(t *testing.T) {
	n := newNode(t, 129)
	inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	if err := api.Create(t.Context(), inv); err != nil {
		t.Fatal(err)
	}
	for i := range n.facts.GPUs {
		inv.Status.GPUs = append(inv.Status.GPUs, v1alpha1.GPU{UUID: string(n.facts.GPUs[i].UUID), Index: int32(i)})
	}
	if err := api.Status().Update(t.Context(), inv); !apierrors.IsInvalid(err) {
		t.Errorf("got %v, want the server to call it invalid", err)
	}
	inv.Status.GPUs = inv.Status.GPUs[1:]
	if err := api.Status().Update(t.Context(), inv); err != nil {
		t.Error(err)
	}
}
