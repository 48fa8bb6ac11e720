package kinds_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
)

// GPUs of a model have the same profiles, and GPUs of another have their own.
func TestInventoriesShareMIGProfiles(t *testing.T) {
	p := &kinds.Trimmer{}
	trimmed := func(gpus ...v1alpha1.GPU) []v1alpha1.GPU {
		inv := &v1alpha1.GPUInventory{Status: v1alpha1.GPUInventoryStatus{GPUs: gpus}}
		want := inv.DeepCopy()
		obj, err := p.Trim(inv)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(any(want), obj); diff != "" {
			t.Errorf("another inventory (-want +got):\n%s", diff)
		}
		return inv.Status.GPUs
	}
	other := controltest.H100(1)
	other.MIG.Profiles[0].MaxInstances--
	a, b := trimmed(controltest.H100(0), other, controltest.L4(2)), trimmed(controltest.H100(0))
	if &a[0].MIG.Profiles[0] != &b[0].MIG.Profiles[0] || &a[0].MIG.Profiles[0] == &a[1].MIG.Profiles[0] {
		t.Error("equal profiles aren't shared, or others are")
	}
}

// TestTrimMetadata checks that of metadata that the caches hold, that of Nodes is trimmed.
func TestTrimMetadata(t *testing.T) {
	object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: "n", UID: "u", ResourceVersion: "3", Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"large": "x"},
	}}
	pod := object.DeepCopy()
	pod.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: "Pod"})
	object.SetGroupVersionKind(kinds.Node())
	node := object.DeepCopy()
	node.Annotations = nil
	for _, want := range []*metav1.PartialObjectMetadata{node, pod} {
		object.SetGroupVersionKind(want.GroupVersionKind())
		got, err := new(kinds.Trimmer).Trim(object.DeepCopy())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(any(want), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", want.Kind, diff)
		}
	}
}
