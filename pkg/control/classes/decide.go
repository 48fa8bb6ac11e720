package classes

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
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
	// foreign: somebody else's class of that name differs from the wanted one, or
	// another release keeps it.
	foreign
)

// change has a class as it exists and as it should be; nil means that there is none.
type change struct{ have, want *unstructured.Unstructured }

// changes returns all classes of the cluster and the release, by name, in the order in
// which they are to be changed: first those that lose their extended resource name. A
// scheduler that sees two classes with the same name, and then one of them without it,
// knows neither by that name (k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache
// 0.37). A class whose name is replaced has none in between, until its next event.
//
// If some classes fail, it returns an error and the changes of the others.
func (w *Wanted) changes(owner metav1.OwnerReference, cluster map[string]*unstructured.Unstructured) ([]change, error) {
	var first, then []change
	var failed []error
	rest := maps.Clone(cluster)
	for _, c := range w.Classes {
		have := cluster[c.Name]
		delete(rest, c.Name)
		want, err := w.desired(c, owner, have)
		if err != nil {
			failed = append(failed, err)
			continue
		}
		if old := resourceName(have); old != "" && old != resourceName(want) {
			unstructured.RemoveNestedField(want.Object, "spec", extendedResourceName)
			first = append(first, change{have, want})
		} else {
			then = append(then, change{have, want})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rest)) {
		first = append(first, change{rest[name], nil})
	}
	return append(first, then...), errors.Join(failed...)
}

// resourceName returns the extended resource name of a class, which may be nil.
func resourceName(o *unstructured.Unstructured) string {
	if o == nil {
		return ""
	}
	name, _, _ := unstructured.NestedString(o.Object, "spec", extendedResourceName)
	return name
}

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

// decide returns the action about one class: have is the one in the cluster, nil if
// there is none, and want the desired one, nil if none is. lacksNames says that the
// server doesn't store extended resource names.
func (w *Wanted) decide(have, want *unstructured.Unstructured, lacksNames bool) action {
	switch {
	case have == nil && want == nil:
		return keep
	case have == nil:
		return create
	case !w.owns(have):
		return decideForeign(have, want, lacksNames)
	case want == nil:
		return remove
	case have.GetDeletionTimestamp() != nil: // it is created again when it is gone
		return keep
	case sameSpec(have, want, lacksNames) && sameMetadata(have, want):
		return keep
	}
	return update
}

func decideForeign(have, want *unstructured.Unstructured, lacksNames bool) action {
	if want == nil || sameSpec(have, want, lacksNames) && otherRelease(have) == "" {
		return keep
	}
	return foreign
}

// sameMetadata compares the fields of the metadata that are written.
func sameMetadata(have, want *unstructured.Unstructured) bool {
	return maps.Equal(have.GetLabels(), want.GetLabels()) && equality.Semantic.DeepEqual(have.GetOwnerReferences(), want.GetOwnerReferences())
}

// owns reports whether a class belongs to this release: to its ClusterRole, also as
// it was before an uninstall, whose classes the garbage collector hasn't deleted yet.
// A label proves nothing, because people copy labels, and all releases have the same.
func (w *Wanted) owns(o *unstructured.Unstructured) bool {
	return slices.Contains(clusterRoles(o), w.Owner)
}

// otherRelease returns the ClusterRole of the release of Tessera that a class
// belongs to, if this release doesn't own it. Empty: none.
func otherRelease(o *unstructured.Unstructured) string {
	if roles := clusterRoles(o); isLabelled(o) && len(roles) > 0 {
		return roles[0]
	}
	return ""
}

// clusterRoles returns the names of the ClusterRoles that own a class.
func clusterRoles(o *unstructured.Unstructured) []string {
	var names []string
	for _, owner := range o.GetOwnerReferences() {
		if group, _, _ := strings.Cut(owner.APIVersion, "/"); group == rbacv1.GroupName && owner.Kind == clusterRole {
			names = append(names, owner.Name)
		}
	}
	return names
}

func isLabelled(o *unstructured.Unstructured) bool {
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
