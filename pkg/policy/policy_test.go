package policy_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/policy"
)

var (
	exclusive   = v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}}
	partitioned = v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.10gb"}}}
)

// named is a policy for all GPUs.
func named(name string, priority int32, created int64) policy.Policy {
	return policy.Policy{Name: name, Priority: priority, Created: time.Unix(created, 0), Plan: exclusive, Nodes: labels.Everything()}
}

func TestPrecedence(t *testing.T) {
	for name, tc := range map[string]struct {
		policies []policy.Policy
		want     string
		lost     []string
	}{
		"none":                   {nil, "", nil},
		"one":                    {[]policy.Policy{named("a", 0, 2)}, "a", nil},
		"priority before age":    {[]policy.Policy{named("a", 0, 1), named("b", 1, 2)}, "b", []string{"a"}},
		"negative priority":      {[]policy.Policy{named("a", -5, 1), named("b", 0, 2)}, "b", []string{"a"}},
		"age before name":        {[]policy.Policy{named("a", 3, 2), named("b", 3, 1)}, "b", []string{"a"}},
		"name when all is equal": {[]policy.Policy{named("c", 3, 2), named("b", 3, 2), named("d", 3, 2)}, "b", []string{"c", "d"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := policy.Decide(tc.policies, nil, resourceapi.Device{})
			if got.Policy != tc.want || !slices.Equal(got.Lost, tc.lost) {
				t.Errorf("got %q before %q, want %q before %q", got.Policy, got.Lost, tc.want, tc.lost)
			}
		})
	}
}

func TestSelection(t *testing.T) {
	onNodes := named("nodes", 9, 1)
	onNodes.Nodes = labels.SelectorFromSet(labels.Set{"pool": "inference"})
	onNodes.Plan = partitioned
	onGPUs := named("gpus", 5, 1)
	onGPUs.GPUs = func(d resourceapi.Device) (bool, error) { return d.Name == "gpu-1", nil }
	broken := named("broken", 7, 1)
	broken.GPUs = func(resourceapi.Device) (bool, error) { return true, errNoKey }
	elsewhere := onNodes
	elsewhere.GPUs = broken.GPUs
	for name, tc := range map[string]struct {
		policies []policy.Policy
		node     labels.Set
		gpu      string
		want     policy.Verdict
	}{
		"nobody selects it":    {[]policy.Policy{onNodes, onGPUs}, nil, "gpu-0", policy.Verdict{Plan: policy.Default()}},
		"by the node":          {[]policy.Policy{onNodes, onGPUs}, labels.Set{"pool": "inference"}, "gpu-0", policy.Verdict{Policy: "nodes", Plan: partitioned}},
		"by the GPU":           {[]policy.Policy{onNodes, onGPUs}, nil, "gpu-1", policy.Verdict{Policy: "gpus", Plan: exclusive}},
		"by both":              {[]policy.Policy{onNodes, onGPUs}, labels.Set{"pool": "inference"}, "gpu-1", policy.Verdict{Policy: "nodes", Plan: partitioned, Lost: []string{"gpus"}}},
		"a failure is no yes":  {[]policy.Policy{broken, onGPUs}, nil, "gpu-1", policy.Verdict{Policy: "gpus", Plan: exclusive, Failed: map[string]error{"broken": errNoKey}}},
		"other nodes are safe": {[]policy.Policy{elsewhere}, nil, "gpu-1", policy.Verdict{Plan: policy.Default()}},
	} {
		t.Run(name, func(t *testing.T) {
			got := policy.Decide(tc.policies, tc.node, resourceapi.Device{Name: tc.gpu})
			if diff := cmp.Diff(tc.want, got, cmpopts.EquateErrors()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

var errNoKey = errors.New("no such key")

// Whatever policies there are, in whatever order: every GPU has one answer, the
// same, and it is that of the best policy that selects it.
func TestDecisionIsTotalAndOrderFree(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		var policies []policy.Policy
		for i := range random.IntN(8) {
			p := named(fmt.Sprintf("p%d", i), int32(random.IntN(3)), int64(random.IntN(3)))
			yes, fails, here := random.IntN(3) > 0, random.IntN(5) == 0, random.IntN(4) > 0
			if !here {
				p.Nodes = labels.Nothing()
			}
			p.GPUs = func(resourceapi.Device) (bool, error) {
				if fails {
					return yes, errNoKey
				}
				return yes, nil
			}
			if random.IntN(2) == 0 {
				p.Plan = partitioned
			}
			policies = append(policies, p)
		}
		first := policy.Decide(policies, nil, resourceapi.Device{})
		if first.Plan.Exclusive == nil && first.Plan.Partitioned == nil {
			t.Fatalf("no plan from %+v", policies)
		}
		mustBeBest(t, policies, first)
		for range 4 {
			random.Shuffle(len(policies), func(i, j int) { policies[i], policies[j] = policies[j], policies[i] })
			if diff := cmp.Diff(first, policy.Decide(policies, nil, resourceapi.Device{}), cmpopts.EquateErrors()); diff != "" {
				t.Fatalf("another order, another answer (-first +now):\n%s", diff)
			}
		}
	}
}

// mustBeBest states precedence once more, pair by pair.
func mustBeBest(t *testing.T, policies []policy.Policy, v policy.Verdict) {
	t.Helper()
	for _, p := range policies {
		ok, err := p.GPUs(resourceapi.Device{})
		selects := ok && err == nil && p.Nodes.Matches(labels.Set{})
		if lost := slices.Contains(v.Lost, p.Name); selects != (lost || p.Name == v.Policy) || lost && p.Name == v.Policy {
			t.Fatalf("%s selects the GPU: %v; verdict %+v", p.Name, selects, v)
		}
		if !selects {
			continue
		}
		best := policies[slices.IndexFunc(policies, func(q policy.Policy) bool { return q.Name == v.Policy })]
		if p.Priority > best.Priority || p.Priority == best.Priority && p.Created.Before(best.Created) {
			t.Fatalf("%s goes before %s", p.Name, best.Name)
		}
	}
}
