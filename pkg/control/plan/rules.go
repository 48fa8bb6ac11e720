package plan

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/rule"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// Rules are the SharingPolicies of the cluster, checked and compiled. They don't change once made.
type Rules struct {
	// version differs where any policy's spec does.
	version string
	// Accepted are the policies that take part, in the last form that was accepted.
	Accepted []rule.Rule
	// Refused says by name what is wrong with a policy's spec. The policy takes part
	// all the same if a form of it was accepted before.
	Refused map[string]error
}

// policies are the rules as pkg/policy takes them, to be asked until ctx ends.
func (r *Rules) policies(ctx context.Context) []policy.Policy {
	out := make([]policy.Policy, len(r.Accepted))
	for i, a := range r.Accepted {
		out[i] = a.Ask(ctx)
	}
	return out
}

// rulebook reads the rules when a policy has changed, and then compiles only
// selectors that weren't there before.
type rulebook struct {
	client      client.Reader
	definitions kinds.Definitions

	mu        sync.Mutex
	current   *Rules
	selectors map[string]*rule.Selector // by expression, of the current rules
	// forms are the policies that take part. The status of a policy has its form
	// too, a moment later, and also after a restart.
	forms map[types.UID]rule.Rule
}

// load returns the rules of the policies that the cache has. It doesn't hold the lock
// while it asks the server about missing policies.
func (b *rulebook) load(ctx context.Context) (*Rules, error) {
	for {
		var list v1alpha1.SharingPolicyList
		if err := b.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("list SharingPolicies: %w", err)
		}
		slices.SortFunc(list.Items, func(a, b v1alpha1.SharingPolicy) int { return cmp.Compare(a.Name, b.Name) })
		version := version(list.Items)
		before, gone := b.changed(list.Items, version)
		if before != nil && before.version == version {
			return before, nil
		}
		names, err := b.checkGone(ctx, gone)
		if err != nil {
			return nil, err
		}
		if after := b.replace(ctx, before, list.Items, version, names); after != nil {
			return after, nil
		}
	}
}

// changed returns the current rules, and, if they are of another version, those of
// their policies that are missing.
func (b *rulebook) changed(all []v1alpha1.SharingPolicy, version string) (current *Rules, gone []policy.Policy) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.current != nil && b.current.version == version {
		return b.current, nil
	}
	for uid, r := range b.forms {
		if !slices.ContainsFunc(all, func(s v1alpha1.SharingPolicy) bool { return s.UID == uid }) {
			gone = append(gone, r.Policy)
		}
	}
	return b.current, gone
}

// checkGone returns an error while policies are missing because their kind is, or
// was a moment ago: GPUs keep their plans then. Otherwise it returns the names of
// those that have gone with their kind for good.
func (b *rulebook) checkGone(ctx context.Context, gone []policy.Policy) ([]string, error) {
	var names []string
	for _, p := range gone {
		since, err := b.definitions.Served(ctx, kinds.SharingPolicies, p.Created)
		if err != nil {
			return nil, err
		}
		if p.Created.Before(since) {
			names = append(names, p.Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// replace reads the policies unless the current rules aren't those of before any
// more, and returns nil then. It logs the policies that have gone with their kind.
func (b *rulebook) replace(ctx context.Context, before *Rules, all []v1alpha1.SharingPolicy, version string, gone []string) *Rules {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.current != before {
		return nil
	}
	if len(gone) > 0 {
		klog.FromContext(ctx).Error(nil, "SharingPolicies were deleted with their CustomResourceDefinition, which has been installed again; "+
			"those that haven't been applied again are no longer in force", "policies", gone)
	}
	b.compileAll(all, version)
	return b.current
}

// version of policies that are sorted by name.
func version(all []v1alpha1.SharingPolicy) string {
	var s strings.Builder
	for i := range all {
		fmt.Fprintf(&s, "%s %s %d\n", all[i].Name, all[i].UID, all[i].Generation)
	}
	return s.String()
}

func (b *rulebook) compileAll(all []v1alpha1.SharingPolicy, version string) {
	known, before := b.selectors, b.forms
	b.selectors, b.forms = make(map[string]*rule.Selector), make(map[types.UID]rule.Rule)
	b.current = &Rules{version: version, Refused: make(map[string]error)}
	try := func(s *v1alpha1.SharingPolicy, form v1alpha1.AcceptedForm) (rule.Rule, error) {
		expression := form.Spec.GPUSelector
		return rule.New(s, form, cmp.Or(b.selectors[expression], known[expression]))
	}
	for i := range all {
		s := &all[i]
		r, err := try(s, v1alpha1.AcceptedForm{Generation: s.Generation, Spec: s.Spec})
		if err != nil {
			b.current.Refused[s.Name] = err
			last, ok := before[s.UID]
			if a := s.Status.Accepted; a != nil && (!ok || a.Generation > last.Form.Generation) {
				last, err = try(s, *a)
				ok = err == nil
			}
			if !ok {
				continue
			}
			r = last
		}
		b.selectors[r.Form.Spec.GPUSelector] = r.Selector
		b.forms[s.UID] = r
		b.current.Accepted = append(b.current.Accepted, r)
	}
}
