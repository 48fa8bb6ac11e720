package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Names of resources.
const (
	SlicesName      = "resourceslices.resource.k8s.io"
	ClaimsName      = "resourceclaims.resource.k8s.io"
	classesName     = "deviceclasses.resource.k8s.io"
	RulesName       = "devicetaintrules.resource.k8s.io"
	InventoriesName = "gpuinventories.gpu.tessera.dev"
	PoliciesName    = "sharingpolicies.gpu.tessera.dev"
	NodesName       = "nodes"
	PodsName        = "pods"
	DaemonSetsName  = "daemonsets.apps"
	EventsName      = "events"
)

// Missing are the parts of a command's output that are missing, by the resource that can't
// be read. Without an entry nothing is missing, or the command fails (RequireRead).
type Missing map[string]string

// Parts that several commands lack.
const (
	NoOffers     = "which devices are offered, and what else fits, isn't known"
	NoHolders    = "who has which device, and what else fits, isn't known"
	NoRules      = "taints that such rules add to devices are ignored"
	NoConditions = "conditions of GPUs and problems of nodes aren't shown"
	NoPolicies   = "the policies of GPUs aren't shown"
	NoGPUs       = "GPUs that aren't offered are unknown"
	NoRanks      = "the ranks of nodes aren't shown"
	NoNodes      = "labels and taints of nodes are ignored"
)

// wholeModel has the parts of the model as a document.
func wholeModel() Missing {
	return Missing{
		SlicesName: NoOffers, ClaimsName: NoHolders, RulesName: NoRules, InventoriesName: NoConditions, PoliciesName: NoPolicies,
		PodsName: "the phases of pods aren't shown", NodesName: NoRanks,
	}
}

// unread is a resource that can't be read, or not all of it, with the reason and remedy.
type unread struct {
	resource, reason, but, do string
	// absent: the cluster doesn't have it.
	absent bool
}

// TolerateUnread remembers, and notes, that a resource can't be read, if the reason is that the
// user may not or that the cluster doesn't have it.
func (r *Reader) TolerateUnread(err error, resource string) error {
	u := unread{resource: resource}
	switch {
	case err == nil:
		return nil
	case apierrors.IsForbidden(err):
		u.reason, u.do = fmt.Sprintf("You may not list %s", resource), AskForList
		if slices.Contains([]string{PodsName, ClaimsName, DaemonSetsName, EventsName}, resource) {
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
	AskForList      = "Ask for the verb list on them."
	inAllNamespaces = "Ask for the verb list on them in all namespaces."
)

// addUnread remembers, and notes, that a resource can't be read.
func (r *Reader) addUnread(u unread) {
	r.unread = append(r.unread, u)
	if part := r.missing[u.resource]; part != "" {
		r.Note("%s: %s%s. %s", u.reason, u.but, part, u.do)
	}
}

// Forget forgets what couldn't be read.
func (r *Reader) Forget() { r.Notes, r.unread = nil, nil }

// AnyUnread reports whether one of the resources can't be read.
func (r *Reader) AnyUnread(resources ...string) bool {
	return slices.ContainsFunc(r.unread, func(u unread) bool { return slices.Contains(resources, u.resource) })
}

// NotServed reports whether the cluster doesn't have the resource.
func (r *Reader) NotServed(resource string) bool {
	return slices.ContainsFunc(r.unread, func(u unread) bool { return u.resource == resource && u.absent })
}

// RequireRead returns an error if one of the resources, which the answer needs, can't be
// read.
func (r *Reader) RequireRead(answer string, resources ...string) error {
	if !r.AnyUnread(resources...) {
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
