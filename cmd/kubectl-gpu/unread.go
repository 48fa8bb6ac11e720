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
	daemonSetsName  = "daemonsets.apps"
	eventsName      = "events"
)

// purpose is the reason why a reader reads: the command, except for the model, which map
// and get print with -o.
type purpose string

const (
	forMap        purpose = "map"
	forGet        purpose = "get"
	forModel      purpose = "model"
	forSlots      purpose = "slots"
	forPolicy     purpose = "policy"
	forWeb        purpose = "web"
	forTop        purpose = "top"
	forDoctor     purpose = "doctor"
	forDrain      purpose = "drain"
	forFits       purpose = "fits"
	forWhy        purpose = "why"
	forTemplate   purpose = "template"
	forCompletion purpose = "completion"
)

// missingPart is the part of an output that is missing, for some purposes, if a resource
// can't be read.
type missingPart struct {
	resource string
	purposes []purpose
	part     string
}

// missingParts are those of all purposes. Where there is no entry nothing is missing, or the
// command fails (requireRead).
func missingParts() []missingPart {
	return []missingPart{
		{slicesName, []purpose{forMap, forGet, forModel, forSlots, forPolicy, forWeb}, "which devices are offered, and what else fits, isn't known"},
		{slicesName, []purpose{forTop}, "the memory of partitions and shares isn't known"},
		{slicesName, []purpose{forDoctor}, "whether nodes publish their devices isn't known"},
		{claimsName, []purpose{forMap, forGet, forModel, forSlots, forPolicy, forWeb}, "who has which device, and what else fits, isn't known"},
		{claimsName, []purpose{forTop}, "who has which device isn't known"},
		{claimsName, []purpose{forDrain}, "which pods would be evicted isn't known"},
		{claimsName, []purpose{forDoctor}, "whether claims are left on nodes that are gone isn't known"},
		{rulesName, []purpose{forMap, forModel, forSlots, forPolicy, forWeb, forFits, forWhy}, "taints that such rules add to devices are ignored"},
		{inventoriesName, []purpose{forMap, forGet, forModel, forWeb}, "conditions of GPUs and problems of nodes aren't shown"},
		{inventoriesName, []purpose{forSlots}, "MIG instances that others made aren't shown"},
		{inventoriesName, []purpose{forTop, forDrain}, "GPUs that aren't offered are unknown"},
		{inventoriesName, []purpose{forDoctor}, "conditions of GPUs and problems of nodes aren't known"},
		{policiesName, []purpose{forGet, forModel, forWeb}, "the policies of GPUs aren't shown"},
		{policiesName, []purpose{forDoctor}, "whether policies are applied isn't known"},
		{nodesName, []purpose{forFits, forWhy}, "labels and taints of nodes are ignored"},
		{nodesName, []purpose{forWeb}, "nodes are grouped by the models of their GPUs, not by their pools"},
		{podsName, []purpose{forModel}, "the phases of pods aren't shown"},
		{podsName, []purpose{forWhy}, "how much device plugins have left isn't known"},
		{podsName, []purpose{forTop}, "nothing can be measured"},
		{podsName, []purpose{forDoctor}, "whether Tessera's own pods are ready isn't known"},
		{daemonSetsName, []purpose{forDoctor}, "whether all of Tessera's pods can be created isn't known"},
		{eventsName, []purpose{forDoctor}, "why pods of Tessera aren't created isn't known"},
		{podsName, []purpose{forWeb}, "which pods wait isn't known"},
	}
}

// missing is the part of the reader's output that is missing without a resource; empty:
// none is.
func (r *reader) missing(resource string) string {
	for _, m := range missingParts() {
		if m.resource == resource && slices.Contains(m.purposes, r.purpose) {
			return m.part
		}
	}
	return ""
}

// unread is a resource that can't be read, or not all of it, with the reason and remedy.
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
		u.reason, u.do = fmt.Sprintf("You may not list %s", resource), askForList
		if slices.Contains([]string{podsName, claimsName, daemonSetsName, eventsName}, resource) {
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

// Remedies that notes end with.
const (
	askForList      = "Ask for the verb list on them."
	inAllNamespaces = "Ask for the verb list on them in all namespaces."
)

// addUnread remembers, and notes, that a resource can't be read.
func (r *reader) addUnread(u unread) {
	r.unread = append(r.unread, u)
	if part := r.missing(u.resource); part != "" {
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

// requireRead returns an error if one of the resources, which the answer needs, can't be
// read.
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
