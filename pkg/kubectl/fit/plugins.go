package fit

import (
	"fmt"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
)

// An extended resource of which a node has allocatable units is a device plugin's there.
// The scheduler then counts units, as it does with processors, and allocates no devices
// for it on that node, whatever drivers publish.

// pluginHas returns how many units of a resource the node's device plugin has.
func pluginHas(n *corev1.Node, name corev1.ResourceName) int64 {
	q := n.Status.Allocatable[name]
	return q.Value()
}

// ServedByPlugins reports whether a device plugin has a resource that the pod requests,
// so that Pods are needed to say how much of it is left.
func (o *Objects) ServedByPlugins(pod *corev1.Pod) bool {
	all := make(classes, len(o.Classes))
	for i := range o.Classes {
		all[o.Classes[i].Name] = &o.Classes[i]
	}
	for name := range all.requested(pod) {
		if slices.ContainsFunc(o.Nodes, func(n corev1.Node) bool { return pluginHas(&n, name) > 0 }) {
			return true
		}
	}
	return false
}

// requested returns how much the pod requests of the extended resources that DeviceClasses
// stand for.
func (c classes) requested(pod *corev1.Pod) corev1.ResourceList {
	names := c.extended()
	out := corev1.ResourceList{}
	for name, q := range resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{}) {
		if !q.IsZero() && names.GetDeviceClass(name) != nil {
			out[name] = q
		}
	}
	return out
}

// extended finds the DeviceClasses of extended resources.
func (c classes) extended() *extendedresourcecache.ExtendedResourceCache {
	names := extendedresourcecache.NewExtendedResourceCache(logr.Discard())
	for _, class := range c {
		names.OnAdd(class, true)
	}
	return names
}

// usedByPods adds up what pods request on each node; nil if the pods aren't known.
func usedByPods(pods []corev1.Pod) map[string]corev1.ResourceList {
	if pods == nil {
		return nil
	}
	out := make(map[string]corev1.ResourceList)
	for i := range pods {
		p := &pods[i]
		if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		used := out[p.Spec.NodeName]
		if used == nil {
			used = corev1.ResourceList{}
			out[p.Spec.NodeName] = used
		}
		for name, q := range resourcehelper.PodRequests(p, resourcehelper.PodResourcesOptions{}) {
			sum := used[name]
			sum.Add(q)
			used[name] = sum
		}
	}
	return out
}

// pluginLacks names a requested resource of which the node's device plugin has too little
// left; "" if it has enough of each that is its own.
func (j *Judge) pluginLacks(n *corev1.Node, requested corev1.ResourceList) string {
	for _, name := range sortedNames(requested) {
		has, want := pluginHas(n, name), requested[name]
		if has == 0 {
			continue
		}
		if j.used == nil {
			return fmt.Sprintf("its device plugin has %d %s, and how many of them are free isn't known", has, name)
		}
		used := j.used[n.Name][name]
		if free := max(0, has-used.Value()); free < want.Value() {
			return fmt.Sprintf("its device plugin has only %d of %d %s free", free, has, name)
		}
	}
	return ""
}

func sortedNames(l corev1.ResourceList) []corev1.ResourceName {
	out := make([]corev1.ResourceName, 0, len(l))
	for name := range l {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// allocatedOn returns the claims without the requests for extended resources that the
// node's device plugin has.
func allocatedOn(n *corev1.Node, claims []*resourceapi.ResourceClaim) []*resourceapi.ResourceClaim {
	out := make([]*resourceapi.ResourceClaim, 0, len(claims))
	for _, c := range claims {
		if c.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "" {
			c = c.DeepCopy()
			c.Spec.Devices.Requests = slices.DeleteFunc(c.Spec.Devices.Requests, func(r resourceapi.DeviceRequest) bool {
				return pluginHas(n, corev1.ResourceName(r.Name)) > 0
			})
			if len(c.Spec.Devices.Requests) == 0 {
				continue
			}
		}
		out = append(out, c)
	}
	return out
}
