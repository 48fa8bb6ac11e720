// Package policy decides which SharingPolicy, and so which plan, applies to
// each GPU.
//
// It is pure: the answer for a GPU follows from the policies, its node's
// labels, and its description as a device; it doesn't depend on the order of
// the policies, and there always is one. pkg/control evaluates a gpuSelector
// and passes that as a function; pkg/offer decides the devices of a plan.
//
// Only the controller and the dry run of kubectl gpu policy import it.
package policy

import (
	"cmp"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// Policy is a SharingPolicy that takes part: one that is well-formed.
type Policy struct {
	Name     string
	Priority int32
	Created  time.Time
	Plan     v1alpha1.Plan
	Health   v1alpha1.HealthPolicy
	// Nodes by their labels.
	Nodes labels.Selector
	// GPUs selects by a GPU's description as a whole device. Nil: all.
	GPUs func(resourceapi.Device) (bool, error)
}

// Verdict is the decision about one GPU.
type Verdict struct {
	// Policy that the GPU is under, by name; empty where no policy selects it.
	Policy string
	// Plan of that policy, or the Default.
	Plan v1alpha1.Plan
	// Health of that policy.
	Health v1alpha1.HealthPolicy
	// Lost are the other policies that select the GPU, by name, sorted.
	Lost []string
	// Failed are the policies whose GPU selector could not be evaluated, because
	// the GPU lacks an attribute, say. They don't select the GPU.
	Failed map[string]error
}

// Default is the plan of GPUs that no policy selects: partitioned into
// pkg/offer's default profiles, where GPU and server can do it.
func Default() v1alpha1.Plan {
	return v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}
}

// Decide says which policy a GPU is under, of those that select its node and
// itself: the one with the highest priority, then the oldest, then the first
// by name.
func Decide(all []Policy, node labels.Set, gpu resourceapi.Device) Verdict {
	v := Verdict{Plan: Default()}
	var selecting []Policy
	for _, p := range all {
		ok, err := p.selects(node, gpu)
		if err != nil {
			if v.Failed == nil {
				v.Failed = make(map[string]error)
			}
			v.Failed[p.Name] = err
			continue
		}
		if ok {
			selecting = append(selecting, p)
		}
	}
	if len(selecting) == 0 {
		return v
	}
	slices.SortFunc(selecting, precedence)
	v.Policy, v.Plan, v.Health = selecting[0].Name, selecting[0].Plan, selecting[0].Health
	for _, p := range selecting[1:] {
		v.Lost = append(v.Lost, p.Name)
	}
	slices.Sort(v.Lost)
	return v
}

func (p Policy) selects(node labels.Set, gpu resourceapi.Device) (bool, error) {
	if !p.Nodes.Matches(node) {
		return false, nil
	}
	if p.GPUs == nil {
		return true, nil
	}
	return p.GPUs(gpu)
}

func precedence(a, b Policy) int {
	return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.Created.Compare(b.Created), cmp.Compare(a.Name, b.Name))
}
