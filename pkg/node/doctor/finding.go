package doctor

import (
	"cmp"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Level is the severity of a finding.
type Level string

const (
	// Trouble violates a rule: somebody has to act.
	Trouble Level = "trouble"
	// Leftover is an unused object of this driver that will be removed
	// automatically, for example an instance that is kept warm.
	Leftover Level = "leftover"
	// Note is information: objects that others have created, or state that could
	// not be read.
	Note Level = "note"
)

// Finding is one result of a check.
type Finding struct {
	Level Level `json:"level"`
	// Check is the fixed name of the rule: "cdi-spec-missing".
	Check string `json:"check"`
	// What describes the finding in a sentence.
	What string `json:"what"`
	// Do is the advice; empty if there is nothing to do.
	Do string `json:"do,omitempty"`
	// Claim is namespace/name, or the claim's UID if the name isn't known.
	Claim string `json:"claim,omitempty"`
	// GPU and Device are the affected ones, if any.
	GPU    gpu.UUID `json:"gpu,omitempty"`
	Device string   `json:"device,omitempty"`
	// Path is the affected file.
	Path string `json:"path,omitempty"`
}

// sameSubject reports whether both are about the same claim or, without a
// claim, the same GPU or file. The problem itself may have changed between the
// checks.
func (f Finding) sameSubject(g Finding) bool {
	switch {
	case f.Claim != "" || g.Claim != "":
		return f.Claim == g.Claim
	case f.GPU != "" || g.GPU != "":
		return f.GPU == g.GPU
	default:
		return f.Path == g.Path
	}
}

// order compares findings by severity, then by subject.
func order(a, b Finding) int {
	rank := map[Level]int{Trouble: 0, Leftover: 1, Note: 2}
	return cmp.Or(
		cmp.Compare(rank[a.Level], rank[b.Level]),
		cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Claim, b.Claim),
		cmp.Compare(a.Check, b.Check), cmp.Compare(a.Device, b.Device),
		cmp.Compare(a.Path, b.Path), cmp.Compare(a.What, b.What),
	)
}

// Report is the result of Examine.
type Report struct {
	// Healthy means that no finding is trouble.
	Healthy bool `json:"healthy"`
	// Looks is the number of checks that were needed.
	Looks int `json:"looks"`
	// Claims and Instances count those in the journal, Daemons the supervisor's
	// MPS daemons, and GPUs the ones that answered.
	Claims    int `json:"claims"`
	Instances int `json:"instances"`
	Daemons   int `json:"daemons"`
	GPUs      int `json:"gpus"`
	// Findings are ordered by severity.
	Findings []Finding `json:"findings"`
}

func (r *Report) has(l Level) bool {
	return slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Level == l })
}
