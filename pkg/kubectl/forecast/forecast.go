// Package forecast has what commands need to ask for the controller's decisions: SharingPolicies
// of the cluster and of files, as the controller takes them, and the abilities of the API
// server. It also has their words.
package forecast

import (
	"context"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/json"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/rule"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// Read reads the SharingPolicy of a file. It refuses unknown fields.
func Read(file string, in io.Reader) (*v1alpha1.SharingPolicy, error) {
	raw, err := cluster.ReadFile(file, in)
	if err != nil {
		return nil, err
	}
	plain, err := sigsyaml.YAMLToJSONStrict(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var kind metav1.TypeMeta
	if err := json.UnmarshalCaseSensitivePreserveInts(plain, &kind); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if kind.Kind != "SharingPolicy" || kind.APIVersion != v1alpha1.GroupVersion.String() {
		return nil, fmt.Errorf("%s has apiVersion %q and kind %q: want one SharingPolicy of %s", file, kind.APIVersion, kind.Kind, v1alpha1.GroupVersion)
	}
	p := new(v1alpha1.SharingPolicy)
	strict, err := json.UnmarshalStrict(plain, p)
	if err = errors.Join(append(strict, err)...); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if p.Name == "" {
		return nil, fmt.Errorf("%s: metadata.name: the SharingPolicy has no name", file)
	}
	return p, nil
}

// With returns the policies with that of a file, which replaces the one of its name.
// The API server checks it.
func With(ctx context.Context, r *cluster.Reader, file string, p *v1alpha1.SharingPolicy, all []v1alpha1.SharingPolicy) ([]v1alpha1.SharingPolicy, error) {
	if err := checkPolicy(ctx, r, p, all); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return append(slices.DeleteFunc(slices.Clone(all), func(b v1alpha1.SharingPolicy) bool { return b.Name == p.Name }), *p), nil
}

// checkPolicy has the API server check the policy, which isn't stored, and sets the
// defaults. If the policy is there already, its age stays.
func checkPolicy(ctx context.Context, r *cluster.Reader, p *v1alpha1.SharingPolicy, before []v1alpha1.SharingPolicy) error {
	p.Spec.SetDefaults()
	p.CreationTimestamp, p.Status = metav1.Now(), v1alpha1.SharingPolicyStatus{}
	verb, request := "create", r.Own.Post()
	if i := slices.IndexFunc(before, func(b v1alpha1.SharingPolicy) bool { return b.Name == p.Name }); i >= 0 {
		p.UID, p.ResourceVersion, p.CreationTimestamp = before[i].UID, before[i].ResourceVersion, before[i].CreationTimestamp
		verb, request = "update", r.Own.Put().Name(p.Name)
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(p)
	if err != nil {
		return fmt.Errorf("write the policy: %w", err)
	}
	delete(object, "status")
	body, err := stdjson.Marshal(object)
	if err != nil {
		return fmt.Errorf("write the policy: %w", err)
	}
	err = request.Resource("sharingpolicies").Param("dryRun", metav1.DryRunAll).Param("fieldValidation", metav1.FieldValidationStrict).
		SetHeader("Content-Type", runtime.ContentTypeJSON).Body(body).Do(ctx).Error()
	if apierrors.IsForbidden(err) {
		r.Note("You may not %s %s: the API server's own checks of the file are missing. Ask for the verb %s on them.", verb, cluster.PoliciesName, verb)
		return nil
	}
	return err
}

// Rules are the policies as the controller takes them: refused ones in their last
// accepted form. One that is refused is an error if it has the name.
func Rules(ctx context.Context, all []v1alpha1.SharingPolicy, name string) ([]policy.Policy, error) {
	var out []policy.Policy
	for i := range all {
		s := &all[i]
		r, err := rule.New(s, v1alpha1.AcceptedForm{Spec: s.Spec}, nil)
		if err != nil && s.Name == name {
			return nil, err
		}
		if err != nil && s.Status.Accepted != nil {
			r, err = rule.New(s, *s.Status.Accepted, nil)
		}
		if err == nil {
			out = append(out, r.Ask(ctx))
		}
	}
	return out, nil
}

// Abilities returns those of the API server and its scheduler, found out as the controller
// does, by dry runs. A user who may not ask sees what the slices show.
func Abilities(ctx context.Context, r *cluster.Reader) (publish.Abilities, error) {
	asker, err := publish.New(r.DRA, r.Kube.Discovery())
	if err != nil {
		return publish.Abilities{}, err
	}
	able, err := asker.Probe(ctx)
	if err != nil || able.Doubt == "" {
		return able, err
	}
	all, err := r.Slices(ctx, "")
	able = able.OrShown(func(yield func(*resourceapi.ResourceSlice) bool) {
		for i := range all {
			if !yield(&all[i]) {
				return
			}
		}
	})
	r.Note("You may not create resourceslices.resource.k8s.io, by whose dry runs the API server's abilities are found out: only those that published slices show are counted on. " +
		"Ask for the verb create on them.")
	return able, err
}

// Text is a plan in a few words.
func Text(p v1alpha1.Plan) string {
	switch {
	case p.Partitioned != nil && len(p.Partitioned.Layout) > 0:
		return "layout " + strings.Join(p.Partitioned.Layout, ", ") + partitionShares(p.Partitioned)
	case p.Partitioned != nil && len(p.Partitioned.Profiles) > 0:
		return "whole or MIG " + strings.Join(p.Partitioned.Profiles, ", ") + partitionShares(p.Partitioned)
	case p.Partitioned != nil:
		return "whole or MIG" + partitionShares(p.Partitioned)
	case p.MPS != nil && p.MPS.Shares != nil:
		return fmt.Sprintf("whole or %d MPS shares", *p.MPS.Shares)
	case p.MPS != nil:
		return "whole or MPS shares by size"
	case p.TimeSliced != nil:
		return fmt.Sprintf("whole or %d replicas", p.TimeSliced.Replicas)
	default:
		return "whole"
	}
}

func partitionShares(p *v1alpha1.PartitionedPlan) string {
	if p.MPS == nil {
		return ""
	}
	return fmt.Sprintf(", each in %d MPS shares", p.MPS.Shares)
}

// AllNodes is the text of a selector that selects all nodes.
const AllNodes = "all"

// NodesText is a selector of nodes in a few words.
func NodesText(s *metav1.LabelSelector) string {
	if s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		return AllNodes
	}
	return metav1.FormatLabelSelector(s)
}
