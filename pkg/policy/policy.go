// Package policy decides which SharingPolicy a GPU is under, and says which
// plans this version can carry out.
//
// Both are pure. Who selects a GPU is found out by pkg/control, which has the
// node's labels and evaluates the selectors; here is only what follows from
// it. The answer doesn't depend on the order of its input.
package policy

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// Policy is what precedence depends on.
type Policy struct {
	Name     string
	Priority int32
	Created  time.Time
}

// Decide returns the policy that a GPU is under, of those that select it: the
// one with the highest priority, then the oldest, then the first by name. If
// none selects it, there is none.
func Decide(selecting []Policy) (Policy, bool) {
	if len(selecting) == 0 {
		return Policy{}, false
	}
	return slices.MinFunc(selecting, func(a, b Policy) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), a.Created.Compare(b.Created), cmp.Compare(a.Name, b.Name))
	}), true
}

// ErrPlanNotSupported says that this version can't carry out a plan.
var ErrPlanNotSupported = errors.New("this version offers GPUs as a whole only: " +
	"the one plan it can carry out is exclusive; the selected GPUs are offered as if this policy did not exist")

// Supported returns ErrPlanNotSupported unless this version can carry out the
// plan.
func Supported(p v1alpha1.Plan) error {
	if p.Exclusive == nil {
		return ErrPlanNotSupported
	}
	return nil
}
