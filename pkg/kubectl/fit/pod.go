package fit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Default sets what an API server sets in a claim that doesn't say it.
func Default(c *resourceapi.ResourceClaim) {
	set := func(mode *resourceapi.DeviceAllocationMode, count *int64) {
		*mode = cmp.Or(*mode, resourceapi.DeviceAllocationModeExactCount)
		if *mode == resourceapi.DeviceAllocationModeExactCount {
			*count = cmp.Or(*count, 1)
		}
	}
	for i := range c.Spec.Devices.Requests {
		r := &c.Spec.Devices.Requests[i]
		if r.Exactly != nil {
			set(&r.Exactly.AllocationMode, &r.Exactly.Count)
		}
		for k := range r.FirstAvailable {
			set(&r.FirstAvailable[k].AllocationMode, &r.FirstAvailable[k].Count)
		}
	}
}

// PodClaims are the claims of a pod.
type PodClaims struct {
	// Waiting have no devices yet; Allocated have.
	Waiting, Allocated []*resourceapi.ResourceClaim
	// Missing are sentences about claims that don't exist, or that the pod can't have.
	Missing []string
	// Uncreated are those of Missing that don't exist yet for a template, by their names in
	// the pod.
	Uncreated []string
}

// ClaimsOf returns the pod's claims, of those given. Extended resources of DeviceClasses
// are a claim that has no name yet, as the scheduler would make it.
func (j *Judge) ClaimsOf(pod *corev1.Pod, claims []resourceapi.ResourceClaim) PodClaims {
	var out PodClaims
	for i := range pod.Spec.ResourceClaims {
		out.add(pod, &pod.Spec.ResourceClaims[i], claims)
	}
	if c := j.extended(pod); c != nil && pod.Status.ExtendedResourceClaimStatus == nil {
		out.Waiting = append(out.Waiting, c)
	}
	return out
}

// add adds one of the pod's claims.
func (p *PodClaims) add(pod *corev1.Pod, of *corev1.PodResourceClaim, claims []resourceapi.ResourceClaim) {
	name, mustBeOwned, err := resourceclaim.Name(pod, of)
	if err != nil {
		p.Uncreated = append(p.Uncreated, of.Name)
		p.miss("The claim %s isn't created yet from the ResourceClaimTemplate %s: check that the template exists in namespace %s.",
			of.Name, deref(of.ResourceClaimTemplateName), pod.Namespace)
		return
	}
	if name == nil {
		return // the pod needs none
	}
	named := func(c resourceapi.ResourceClaim) bool { return c.Namespace == pod.Namespace && c.Name == *name }
	k := slices.IndexFunc(claims, named)
	switch {
	case k < 0:
		p.miss("The ResourceClaim %s/%s doesn't exist: create it.", pod.Namespace, *name)
	case claims[k].DeletionTimestamp != nil:
		p.miss("The ResourceClaim %s/%s is being deleted, so that no other pod gets it: it goes when the pods that use it have "+
			"ended, and a new one can be created then.", pod.Namespace, *name)
	case mustBeOwned && resourceclaim.IsForPod(pod, &claims[k], true) != nil:
		p.miss("The ResourceClaim %s/%s is neither this pod's own nor that of its PodGroup: delete it, and Kubernetes creates a "+
			"new one.", pod.Namespace, *name)
	case claims[k].Status.Allocation != nil:
		p.Allocated = append(p.Allocated, &claims[k])
	default:
		p.Waiting = append(p.Waiting, &claims[k])
	}
}

func (p *PodClaims) miss(format string, args ...any) {
	p.Missing = append(p.Missing, fmt.Sprintf(format, args...))
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// extended is the claim that the scheduler makes for the pod's extended resources; nil if
// it has none that a DeviceClass stands for.
func (j *Judge) extended(pod *corev1.Pod) *resourceapi.ResourceClaim {
	names := j.classes.extended()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: pod.Namespace, Name: "of the extended resources",
		Annotations: map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"},
	}}
	for name, n := range extendedAmounts(pod) {
		class := names.GetDeviceClass(name)
		if class == nil {
			continue
		}
		c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, resourceapi.DeviceRequest{
			Name: string(name), Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: class.Name, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: n,
			},
		})
	}
	if len(c.Spec.Devices.Requests) == 0 {
		return nil
	}
	slices.SortFunc(c.Spec.Devices.Requests, func(a, b resourceapi.DeviceRequest) int { return cmp.Compare(a.Name, b.Name) })
	return c
}

// extendedAmounts is how many devices a pod needs for each resource: those of all
// containers that stay, and as many more as an init container that ends needs beside
// those of the staying containers after it, which it can have before they start. It
// can't have those of sidecars before it.
func extendedAmounts(pod *corev1.Pod) map[corev1.ResourceName]int64 {
	stay, more := make(map[corev1.ResourceName]int64), make(map[corev1.ResourceName]int64)
	for _, c := range pod.Spec.Containers {
		for name, q := range c.Resources.Requests {
			stay[name] += q.Value()
		}
	}
	for _, c := range slices.Backward(pod.Spec.InitContainers) {
		stays := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		for name, q := range c.Resources.Requests {
			if stays {
				stay[name] += q.Value()
			} else {
				more[name] = max(more[name], q.Value()-stay[name])
			}
		}
	}
	for name, n := range more {
		stay[name] += n
	}
	maps.DeleteFunc(stay, func(_ corev1.ResourceName, n int64) bool { return n <= 0 })
	return stay
}

// Candidates returns the nodes that admit the pod as far as their labels, taints, device
// plugins and its allocated claims are concerned, and sentences about the others. Nodes of
// which nothing but the name is known are candidates.
func (j *Judge) Candidates(pod *corev1.Pod, allocated []*resourceapi.ResourceClaim) ([]*corev1.Node, []string) {
	var out []*corev1.Node
	why := make(map[string]int)
	requested := j.classes.requested(pod)
	for _, n := range j.nodes {
		if reason := cmp.Or(j.refuses(n, pod, allocated), j.pluginLacks(n, requested)); reason != "" {
			why[reason]++
			continue
		}
		out = append(out, n)
	}
	var sentences []string
	for reason, n := range why {
		sentences = append(sentences, fmt.Sprintf("%s: %s", count(n, "node"), reason))
	}
	slices.Sort(sentences)
	return out, sentences
}

// refuses says why the node doesn't take the pod; "" if it does.
func (j *Judge) refuses(n *corev1.Node, pod *corev1.Pod, allocated []*resourceapi.ResourceClaim) string {
	if ok, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(n); !j.bare && (err != nil || !ok) {
		return "the pod's node selector or affinity excludes it"
	}
	keepsOff := func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}
	if t, found := corev1helpers.FindMatchingUntoleratedTaint(logr.Discard(), n.Spec.Taints, pod.Spec.Tolerations, keepsOff, false); found {
		return "the node's taint " + t.Key + " keeps the pod off"
	}
	for _, c := range allocated {
		s := c.Status.Allocation.NodeSelector
		if s == nil {
			continue
		}
		selector, err := nodeaffinity.NewNodeSelector(s)
		if err != nil || !selector.Match(n) {
			return fmt.Sprintf("claim %s/%s has its devices on another node", c.Namespace, c.Name)
		}
	}
	return ""
}
