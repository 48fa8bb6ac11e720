package classes

import (
	"fmt"
	"maps"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// action is what to do about one DeviceClass.
type action int

const (
	keep action = iota // it is as it should be, or is somebody else's and serves as well
	create
	update
	remove
	// foreign: somebody else's class of that name differs from the wanted one.
	foreign
)

// desired returns the class as it should be. have is the existing object, if any,
// whose other labels and annotations it keeps.
func (w *Wanted) desired(c Class, owner metav1.OwnerReference, have *unstructured.Unstructured) (*unstructured.Unstructured, error) {
	spec, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&c.Spec)
	if err != nil {
		return nil, fmt.Errorf("convert DeviceClass %s: %w", c.Name, err)
	}
	want := &unstructured.Unstructured{Object: map[string]any{}}
	if have != nil {
		want = have.DeepCopy()
		unstructured.RemoveNestedField(want.Object, "metadata", "managedFields")
	}
	want.SetName(c.Name)
	labels := want.GetLabels()
	if labels == nil {
		labels = make(map[string]string)
	}
	maps.Copy(labels, w.Labels)
	labels[publish.ManagedByLabel] = publish.ManagedBy
	want.SetLabels(labels)
	want.SetOwnerReferences([]metav1.OwnerReference{owner})
	want.Object["spec"] = spec
	return want, nil
}

// decide compares the class that the cluster has, nil if none, with the desired one,
// nil if none is wanted. lacksNames says that the server doesn't store extended
// resource names.
func decide(have, want *unstructured.Unstructured, lacksNames bool) action {
	switch {
	case have == nil && want == nil:
		return keep
	case have == nil:
		return create
	case isOurs(have) && want == nil:
		return remove
	case want == nil:
		return keep
	}
	same := sameSpec(have, want, lacksNames)
	switch {
	case !isOurs(have) && !same:
		return foreign
	case !isOurs(have), have.GetDeletionTimestamp() != nil: // what is being deleted is created again when it is gone
		return keep
	case same && sameMetadata(have, want):
		return keep
	}
	return update
}

// sameMetadata compares what is written of the metadata.
func sameMetadata(have, want *unstructured.Unstructured) bool {
	return maps.Equal(have.GetLabels(), want.GetLabels()) && equality.Semantic.DeepEqual(have.GetOwnerReferences(), want.GetOwnerReferences())
}

func isOurs(o *unstructured.Unstructured) bool {
	return o.GetLabels()[publish.ManagedByLabel] == publish.ManagedBy
}

// extendedResourceName is the field of a DeviceClass that servers may not store:
// Kubernetes has it since 1.34, behind the feature gate DRAExtendedResource.
const extendedResourceName = "extendedResourceName"

// lostName reports whether the server dropped the extended resource name, and
// nothing else.
func lostName(stored, sent *unstructured.Unstructured) bool {
	return !sameSpec(stored, sent, false) && sameSpec(stored, sent, true)
}

// sameSpec compares two classes. withoutName accepts that have has no extended
// resource name where want has one.
func sameSpec(have, want *unstructured.Unstructured, withoutName bool) bool {
	a, _, _ := unstructured.NestedMap(have.Object, "spec")
	b, _, _ := unstructured.NestedMap(want.Object, "spec")
	if _, has := a[extendedResourceName]; withoutName && !has {
		delete(b, extendedResourceName)
	}
	return equality.Semantic.DeepEqual(a, b)
}
