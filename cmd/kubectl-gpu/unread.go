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

// missing are the parts of a command's output that are missing, by the resource that can't
// be read. Without an entry nothing is missing, or the command fails (requireRead).
type missing map[string]string

// Parts that several commands have.
const (
	noOffers     = "which devices are offered, and what else fits, isn't known"
	noHolders    = "who has which device, and what else fits, isn't known"
	noRules      = "taints that such rules add to devices are ignored"
	noConditions = "conditions of GPUs and problems of nodes aren't shown"
	noPolicies   = "the policies of GPUs aren't shown"
	noGPUs       = "GPUs that aren't offered are unknown"
	noNodes      = "labels and taints of nodes are ignored"
)

// wholeModel has the parts of the model as a document.
func wholeModel() missing {
	return missing{
		slicesName: noOffers, claimsName: noHolders, rulesName: noRules, inventoriesName: noConditions, policiesName: noPolicies,
		podsName: "the phases of pods aren't shown",
	}
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
	if part := r.missing[u.resource]; part != "" {
		r.note("%s: %s%s. %s", u.reason, u.but, part, u.do)
	}
}

// forget forgets what couldn't be read.
func (r *reader) forget() { r.notes, r.unread = nil, nil }

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
