package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Names of resources.
const (
	slicesName      = "resourceslices.resource.k8s.io"
	claimsName      = "resourceclaims.resource.k8s.io"
	classesName     = "deviceclasses.resource.k8s.io"
	rulesName       = "devicetaintrules.resource.k8s.io"
	inventoriesName = "gpuinventories.gpu.tessera.dev"
	policiesName    = "sharingpolicies.gpu.tessera.dev"
	nodesName       = "nodes"
	podsName        = "pods"
)

// modelCommand is any command that prints the model with -o.
const modelCommand = "model"

// missingParts are the parts of the output of commands that are missing if a resource can't be
// read. Where there is no entry nothing is missing, or the command fails (requireRead).
func missingParts() []struct{ resource, commands, part string } {
	return []struct{ resource, commands, part string }{
		{slicesName, "map get model slots policy web", "which devices are offered, and what else fits, isn't known"},
		{slicesName, "top", "the memory of partitions and shares isn't known"},
		{slicesName, "doctor", "whether nodes publish their devices isn't known"},
		{claimsName, "map get model slots policy web", "who has which device, and what else fits, isn't known"},
		{claimsName, "top", "who has which device isn't known"},
		{claimsName, "drain", "which pods would be evicted isn't known"},
		{claimsName, "doctor", "whether claims are left on nodes that are gone isn't known"},
		{rulesName, "map model slots policy web fits why", "taints that such rules add to devices are ignored"},
		{inventoriesName, "map get model web", "conditions of GPUs and problems of nodes aren't shown"},
		{inventoriesName, "slots", "MIG instances that others made aren't shown"},
		{inventoriesName, "top drain", "GPUs that aren't offered are unknown"},
		{inventoriesName, "doctor", "conditions of GPUs and problems of nodes aren't known"},
		{policiesName, "get model web", "the policies of GPUs aren't shown"},
		{policiesName, "doctor", "whether policies are applied isn't known"},
		{nodesName, "fits why", "labels and taints of nodes are ignored"},
		{nodesName, "web", "nodes are grouped by the models of their GPUs, not by their pools"},
		{podsName, "model", "the phases of pods aren't shown"},
		{podsName, "top", "nothing can be measured"},
		{podsName, "doctor", "whether Tessera's own pods are ready isn't known"},
		{podsName, "web", "which pods wait isn't known"},
	}
}

// missingPart is the part of the command's output that is missing without a resource; empty:
// none is.
func (r *reader) missingPart(resource string) string {
	for _, l := range missingParts() {
		if l.resource == resource && slices.Contains(strings.Fields(l.commands), r.command) {
			return l.part
		}
	}
	return ""
}

// unread is a resource that can't be read, or not all of it: the reason, and what to do.
type unread struct {
	resource, reason, but, do string
	// absent: the cluster doesn't have it.
	absent bool
}

// tolerateUnread remembers, and notes, that a resource can't be read, if the reason is that the
// user may not or that the cluster doesn't have it.
func (r *reader) tolerateUnread(err error, resource string) error {
	u := unread{resource: resource}
	switch {
	case err == nil:
		return nil
	case apierrors.IsForbidden(err):
		u.reason, u.do = fmt.Sprintf("You may not list %s", resource), "Ask for the verb list on them."
		if resource == podsName || resource == claimsName {
			u.do = inAllNamespaces
		}
	case apierrors.IsNotFound(err):
		u.reason, u.do, u.absent = fmt.Sprintf("The cluster has no %s", resource), "Is Tessera installed there?", true
	default:
		return fmt.Errorf("list %s: %w", resource, err)
	}
	r.addUnread(u)
	return nil
}

const inAllNamespaces = "Ask for the verb list on them in all namespaces."

// addUnread remembers, and notes, that a resource can't be read.
func (r *reader) addUnread(u unread) {
	r.unread = append(r.unread, u)
	if part := r.missingPart(u.resource); part != "" {
		r.note("%s: %s%s. %s", u.reason, u.but, part, u.do)
	}
}

// anyUnread reports whether one of the resources can't be read.
func (r *reader) anyUnread(resources ...string) bool {
	return slices.ContainsFunc(r.unread, func(u unread) bool { return slices.Contains(resources, u.resource) })
}

// notServed reports whether the cluster doesn't have the resource.
func (r *reader) notServed(resource string) bool {
	return slices.ContainsFunc(r.unread, func(u unread) bool { return u.resource == resource && u.absent })
}

// requireRead is an error if one of the resources can't be read, without which an answer
// would be wrong.
func (r *reader) requireRead(answer string, resources ...string) error {
	if !r.anyUnread(resources...) {
		return nil
	}
	lines := []string{fmt.Sprintf("can't say %s, because these couldn't be read:", answer)}
	for _, u := range r.unread {
		if slices.Contains(resources, u.resource) {
			lines = append(lines, fmt.Sprintf("%s. %s", u.reason, u.do))
		}
	}
	return errors.New(strings.Join(lines, "\n"))
}
