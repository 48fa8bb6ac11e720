package fit

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// User uses a claim: a pod, or a PodGroup of which no pod is known.
type User struct {
	// Pod is the pod's name, and UID its UID; both are empty for a PodGroup.
	Pod string
	UID types.UID
	// Group is the PodGroup for which the claim is reserved; empty where it is reserved for
	// the pod itself.
	Group string
}

// Groups knows the pods of PodGroups, by namespace and group.
type Groups map[types.NamespacedName][]*corev1.Pod

// GroupsOf finds the PodGroups of the pods.
func GroupsOf(pods []corev1.Pod) Groups {
	out := make(Groups)
	for i := range pods {
		p := &pods[i]
		if g := p.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
			name := types.NamespacedName{Namespace: p.Namespace, Name: *g.PodGroupName}
			out[name] = append(out[name], p)
		}
	}
	return out
}

// UsersOf returns who uses the claim, pods first, by name. Of a PodGroup, these are the
// pods that name the claim and haven't ended, as Kubernetes sees it.
func (g Groups) UsersOf(c *resourceapi.ResourceClaim) []User {
	var out []User
	for _, by := range c.Status.ReservedFor {
		switch {
		case by.APIGroup == corev1.GroupName && by.Resource == "pods":
			out = append(out, User{Pod: by.Name, UID: by.UID})
		case ofPodGroup(by):
			out = append(out, g.members(c, by.Name)...)
		}
	}
	slices.SortFunc(out, func(a, b User) int {
		if a.Pod == "" || b.Pod == "" {
			return cmp.Or(cmp.Compare(b.Pod, a.Pod), cmp.Compare(a.Group, b.Group))
		}
		return cmp.Compare(a.Pod, b.Pod)
	})
	return slices.CompactFunc(out, func(a, b User) bool { return a.Pod == b.Pod && (a.Pod != "" || a.Group == b.Group) })
}

// members returns the pods of a PodGroup that use the claim, or the group if none is known.
func (g Groups) members(c *resourceapi.ResourceClaim, group string) []User {
	var out []User
	for _, p := range g[types.NamespacedName{Namespace: c.Namespace, Name: group}] {
		ended := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
		names := func(of corev1.PodResourceClaim) bool {
			name, _, err := resourceclaim.Name(p, &of)
			return err == nil && name != nil && *name == c.Name
		}
		if !ended && slices.ContainsFunc(p.Spec.ResourceClaims, names) {
			out = append(out, User{Pod: p.Name, UID: p.UID, Group: group})
		}
	}
	if len(out) == 0 {
		return []User{{Group: group}}
	}
	return out
}

// GroupNamespaces returns the namespaces with claims that are reserved for PodGroups, by
// name.
func GroupNamespaces(claims []resourceapi.ResourceClaim) []string {
	out := sets.New[string]()
	for i := range claims {
		if slices.ContainsFunc(claims[i].Status.ReservedFor, ofPodGroup) {
			out.Insert(claims[i].Namespace)
		}
	}
	return sets.List(out)
}

func ofPodGroup(by resourceapi.ResourceClaimConsumerReference) bool {
	return by.APIGroup == schedulingapi.GroupName && by.Resource == "podgroups"
}
