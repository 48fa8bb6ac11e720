// Package rule checks SharingPolicies and compiles their selectors, for
// pkg/policy to decide by. The controller uses it, and the dry run of kubectl gpu policy.
package rule

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// Rule is a policy that takes part.
type Rule struct {
	// Policy without its GPUs; Ask adds them.
	Policy   policy.Policy
	Selector *Selector // nil: all GPUs
	Form     v1alpha1.AcceptedForm
}

// New returns an error for a form of a policy that can't take part. Its selector is
// compiled unless it is known.
func New(s *v1alpha1.SharingPolicy, form v1alpha1.AcceptedForm, known *Selector) (Rule, error) {
	spec := form.Spec.DeepCopy()
	if errs := spec.Validate(); len(errs) > 0 {
		return Rule{}, errs.ToAggregate()
	}
	r := Rule{
		Policy: policy.Policy{
			Name: s.Name, Priority: spec.Priority, Created: s.CreationTimestamp.Time,
			Plan: spec.Plan, Health: spec.Health, Nodes: labels.Everything(),
		},
		Form: v1alpha1.AcceptedForm{Generation: form.Generation, Spec: *spec},
	}
	var err error
	if spec.NodeSelector != nil {
		if r.Policy.Nodes, err = metav1.LabelSelectorAsSelector(spec.NodeSelector); err != nil {
			return Rule{}, fmt.Errorf("spec.nodeSelector: %w", err)
		}
	}
	if r.Selector = known; known == nil && spec.GPUSelector != "" {
		if r.Selector, err = compile(spec.GPUSelector); err != nil {
			return Rule{}, err
		}
	}
	return r, nil
}

// Ask returns the rule as pkg/policy takes it, to be asked until ctx ends.
func (r Rule) Ask(ctx context.Context) policy.Policy {
	p := r.Policy
	if r.Selector != nil {
		p.GPUs = func(d resourceapi.Device) (bool, error) { return r.Selector.matches(ctx, d) }
	}
	return p
}
