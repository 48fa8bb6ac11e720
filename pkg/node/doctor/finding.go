package doctor

import (
	"cmp"
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Level says how much a finding matters.
type Level string

const (
	// Trouble must not be: somebody has to do something.
	Trouble Level = "trouble"
	// Leftover is this driver's own, used by nobody, and goes by itself: an
	// instance that is kept warm, for instance.
	Leftover Level = "leftover"
	// Note is worth knowing: what others have made, or what could not be seen.
	Note Level = "note"
)

// Finding is one thing that was found.
type Finding struct {
	Level Level `json:"level"`
	// Check names the rule, in a word that doesn't change: "cdi-spec-missing".
	Check string `json:"check"`
	// What is there, or isn't, in a sentence.
	What string `json:"what"`
	// Do is what to do about it; empty where nothing is to be done.
	Do string `json:"do,omitempty"`
	// Claim as namespace/name, or its UID where the name isn't known.
	Claim string `json:"claim,omitempty"`
	// GPU and Device concerned, as far as there are any.
	GPU    gpu.UUID `json:"gpu,omitempty"`
	Device string   `json:"device,omitempty"`
	// Path of the file concerned.
	Path string `json:"path,omitempty"`
}

// sameSubject says whether both are about the same claim or, where there is none,
// the same GPU or file. What is wrong with it may look another way meanwhile.
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

// order puts what matters most first, then what belongs together.
func order(a, b Finding) int {
	rank := map[Level]int{Trouble: 0, Leftover: 1, Note: 2}
	return cmp.Or(
		cmp.Compare(rank[a.Level], rank[b.Level]),
		cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Claim, b.Claim),
		cmp.Compare(a.Check, b.Check), cmp.Compare(a.Device, b.Device),
		cmp.Compare(a.Path, b.Path), cmp.Compare(a.What, b.What),
	)
}

// Report is what Examine has seen.
type Report struct {
	// Healthy: no finding is trouble.
	Healthy bool `json:"healthy"`
	// Looks is how often it took to be sure.
	Looks int `json:"looks"`
	// Claims and Instances in the journal, MPS daemons that the supervisor has, and
	// GPUs that answered.
	Claims    int `json:"claims"`
	Instances int `json:"instances"`
	Daemons   int `json:"daemons"`
	GPUs      int `json:"gpus"`
	// Findings, those that matter most first.
	Findings []Finding `json:"findings"`
}

func (r *Report) has(l Level) bool {
	return slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Level == l })
}
