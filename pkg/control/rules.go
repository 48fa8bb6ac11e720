package control

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// rules are the SharingPolicies of the cluster, checked and compiled. They
// don't change once made.
type rules struct {
	// version differs where any policy's spec does.
	version string
	// taking part, and refused, by name.
	accepted []rule
	refused  map[string]error
}

// rule is a policy that takes part.
type rule struct {
	policy   policy.Policy
	selector *selector // nil: all GPUs
}

// policies are the rules as pkg/policy takes them, to be asked until ctx ends.
func (r *rules) policies(ctx context.Context) []policy.Policy {
	out := make([]policy.Policy, len(r.accepted))
	for i, a := range r.accepted {
		out[i] = a.policy
		if a.selector != nil {
			out[i].GPUs = func(d resourceapi.Device) (bool, error) { return a.selector.matches(ctx, d) }
		}
	}
	return out
}

// rulebook reads the rules. They are made anew when a policy changed, and then
// only selectors that weren't there before are compiled.
type rulebook struct {
	client client.Reader

	mu        sync.Mutex
	current   *rules
	selectors map[string]*selector // by expression, of the current rules
}

func (b *rulebook) rules(ctx context.Context) (*rules, error) {
	var list v1alpha1.SharingPolicyList
	if err := b.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list SharingPolicies: %w", err)
	}
	slices.SortFunc(list.Items, func(a, b v1alpha1.SharingPolicy) int { return cmp.Compare(a.Name, b.Name) })
	version := version(list.Items)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.current == nil || b.current.version != version {
		b.read(list.Items, version)
	}
	return b.current, nil
}

// version of policies that are sorted by name.
func version(all []v1alpha1.SharingPolicy) string {
	var s strings.Builder
	for i := range all {
		fmt.Fprintf(&s, "%s %s %d\n", all[i].Name, all[i].UID, all[i].Generation)
	}
	return s.String()
}

func (b *rulebook) read(all []v1alpha1.SharingPolicy, version string) {
	known := b.selectors
	b.selectors = make(map[string]*selector)
	b.current = &rules{version: version, refused: make(map[string]error)}
	for i := range all {
		expression := all[i].Spec.GPUSelector
		r, err := newRule(&all[i], cmp.Or(b.selectors[expression], known[expression]))
		if err != nil {
			b.current.refused[all[i].Name] = err
			continue
		}
		b.selectors[expression] = r.selector
		b.current.accepted = append(b.current.accepted, r)
	}
}

// newRule returns an error for a policy that can't take part. Its selector is
// compiled unless it is known.
func newRule(s *v1alpha1.SharingPolicy, known *selector) (rule, error) {
	if errs := s.Spec.Validate(); len(errs) > 0 {
		return rule{}, errs.ToAggregate()
	}
	r := rule{policy: policy.Policy{
		Name: s.Name, Priority: s.Spec.Priority, Created: s.CreationTimestamp.Time,
		Plan: *s.Spec.Plan.DeepCopy(), Nodes: labels.Everything(),
	}}
	var err error
	if s.Spec.NodeSelector != nil {
		if r.policy.Nodes, err = metav1.LabelSelectorAsSelector(s.Spec.NodeSelector); err != nil {
			return rule{}, fmt.Errorf("spec.nodeSelector: %w", err)
		}
	}
	if r.selector = known; known == nil && s.Spec.GPUSelector != "" {
		if r.selector, err = compile(s.Spec.GPUSelector); err != nil {
			return rule{}, err
		}
	}
	return r, nil
}
