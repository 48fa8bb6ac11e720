package classes

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/utils/ptr"

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
type change struct{ have, want *resourceapi.DeviceClass }

// changes returns all classes of the cluster and the release, by name, in the order in
// which they are to be changed: first those that lose their extended resource name. A
// scheduler that sees two classes with the same name, and then one of them without it,
// knows neither by that name (k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache
// 0.37). A class whose name is replaced has none in between, until its next event.
func (w *Wanted) changes(owner metav1.OwnerReference, cluster map[string]*resourceapi.DeviceClass) []change {
	var first, then []change
	rest := maps.Clone(cluster)
	for _, c := range w.Classes {
		have := cluster[c.Name]
		delete(rest, c.Name)
		want := w.desired(c, owner, have)
		if have != nil && have.Spec.ExtendedResourceName != nil && !ptr.Equal(have.Spec.ExtendedResourceName, want.Spec.ExtendedResourceName) {
			want.Spec.ExtendedResourceName = nil
			first = append(first, change{have, want})
		} else {
			then = append(then, change{have, want})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rest)) {
		first = append(first, change{rest[name], nil})
	}
	return append(first, then...)
}

// desired returns the class as it should be. have is the existing object, if any,
// whose other labels and annotations it keeps.
func (w *Wanted) desired(c Class, owner metav1.OwnerReference, have *resourceapi.DeviceClass) *resourceapi.DeviceClass {
	want := &resourceapi.DeviceClass{}
	if have != nil {
		have.ObjectMeta.DeepCopyInto(&want.ObjectMeta)
		want.ManagedFields = nil
	}
	want.Name = c.Name
	labels := map[string]string{}
	for _, some := range []map[string]string{want.Labels, w.Labels, {publish.ManagedByLabel: publish.ManagedBy}} {
		maps.Copy(labels, some)
	}
	want.Labels = labels
	want.OwnerReferences = []metav1.OwnerReference{owner}
	c.Spec.DeepCopyInto(&want.Spec)
	return want
}

// decide returns the action about one class: have is the one in the cluster, nil if
// there is none, and want the desired one, nil if none is. lacksNames says that the
// server doesn't store extended resource names.
func (w *Wanted) decide(have, want *resourceapi.DeviceClass, lacksNames bool) action {
	switch {
	case have == nil && want == nil:
		return keep
	case have == nil:
		return create
	case !w.owns(have):
		return decideForeign(have, want, lacksNames)
	case want == nil:
		return remove
	case have.DeletionTimestamp != nil: // it is created again when it is gone
		return keep
	case sameSpec(have, want, lacksNames) && sameMetadata(have, want):
		return keep
	}
	return update
}

func decideForeign(have, want *resourceapi.DeviceClass, lacksNames bool) action {
	if want == nil || sameSpec(have, want, lacksNames) && otherRelease(have) == "" {
		return keep
	}
	return foreign
}

// sameMetadata compares the fields of the metadata that are written.
func sameMetadata(have, want *resourceapi.DeviceClass) bool {
	return maps.Equal(have.Labels, want.Labels) && equality.Semantic.DeepEqual(have.OwnerReferences, want.OwnerReferences)
}

// owns reports whether a class belongs to this release: to its ClusterRole, also as
// it was before an uninstall, whose classes the garbage collector hasn't deleted yet.
// A label proves nothing, because people copy labels, and all releases have the same.
func (w *Wanted) owns(o *resourceapi.DeviceClass) bool {
	return slices.Contains(clusterRoles(o), w.Owner)
}

// otherRelease returns the ClusterRole of the release of Tessera that a class
// belongs to, if this release doesn't own it. Empty: none.
func otherRelease(o *resourceapi.DeviceClass) string {
	if roles := clusterRoles(o); isLabelled(o) && len(roles) > 0 {
		return roles[0]
	}
	return ""
}

// clusterRoles returns the names of the ClusterRoles that own a class.
func clusterRoles(o *resourceapi.DeviceClass) []string {
	var names []string
	for _, owner := range o.OwnerReferences {
		if group, _, _ := strings.Cut(owner.APIVersion, "/"); group == rbacv1.GroupName && owner.Kind == "ClusterRole" {
			names = append(names, owner.Name)
		}
	}
	return names
}

func isLabelled(o *resourceapi.DeviceClass) bool {
	return o.Labels[publish.ManagedByLabel] == publish.ManagedBy
}

// lostName reports whether the server dropped the extended resource name, and
// nothing else.
func lostName(stored, sent *resourceapi.DeviceClass) bool {
	return !sameSpec(stored, sent, false) && sameSpec(stored, sent, true)
}

// sameSpec compares two classes. withoutName accepts that have has no extended
// resource name where want has one: Kubernetes has it since 1.34, behind the feature gate
// DRAExtendedResource.
func sameSpec(have, want *resourceapi.DeviceClass, withoutName bool) bool {
	spec := want.Spec
	if withoutName && have.Spec.ExtendedResourceName == nil {
		spec.ExtendedResourceName = nil
	}
	e := equality.Semantic.Copy()
	utilruntime.Must(e.AddFunc(sameJSON))
	return e.DeepEqual(have.Spec, spec)
}

// sameJSON compares the parameters of a driver, which others may have written in another form.
func sameJSON(a, b runtime.RawExtension) bool {
	var left, right any
	return bytes.Equal(a.Raw, b.Raw) ||
		json.Unmarshal(a.Raw, &left) == nil && json.Unmarshal(b.Raw, &right) == nil && equality.Semantic.DeepEqual(left, right)
}
