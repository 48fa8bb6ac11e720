package health

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// forgetAfter is how long after its end a cause that comes back counts as the same
	// trouble.
	forgetAfter = 10 * time.Minute
	// maxAbsence is the most time for which the readings must agree that a cause is over.
	maxAbsence = 4 * time.Minute
)

// Flap counts causes of one kind that have ended by themselves, each less than
// forgetAfter before the next one began.
type Flap struct {
	Type   gpu.ConditionType `json:"type"`
	Source Source            `json:"source"`
	// Ended is the end of the last one.
	Ended time.Time `json:"ended"`
	Times int       `json:"times"`

	extra map[string]json.RawMessage
}

func (f Flap) isOf(c Cause) bool { return c.isOf(f.Type, f.Source) }

// requiredAbsence returns the least time between the first reading without the cause and
// the one that ends it. It doubles each time that the cause comes back.
func (s State) requiredAbsence(c Cause) time.Duration {
	d := minAbsence
	for range s.flapsOf(c.Type, c.Source) {
		if d = 2 * d; d >= maxAbsence {
			return maxAbsence
		}
	}
	return d
}

// flapsOf returns how often a cause has come back.
func (s State) flapsOf(t gpu.ConditionType, source Source) int {
	i := slices.IndexFunc(s.Flaps, func(f Flap) bool { return f.Type == t && f.Source == source })
	if i < 0 {
		return 0
	}
	return s.Flaps[i].Times
}

// removeEnded removes the causes that are over, and counts them. It forgets the counts of
// those that have not come back for long.
func (s State) removeEnded(at time.Time) State {
	var causes []Cause
	flaps := slices.Clone(s.Flaps)
	for _, c := range s.Causes {
		switch over := !c.goneAt.IsZero() && at.Sub(c.goneAt) >= s.requiredAbsence(c); {
		case !over:
			causes = append(causes, c)
		case c.Open():
			flaps = recordEnd(flaps, c, at)
		}
	}
	s.Causes, s.Flaps = causes, flaps
	s.Flaps = s.recentFlaps(at)
	return s
}

// recentFlaps returns the counts without those of causes that have not come back for long.
func (s State) recentFlaps(at time.Time) []Flap {
	return slices.DeleteFunc(slices.Clone(s.Flaps), func(f Flap) bool {
		recent := !at.Before(f.Ended) && at.Sub(f.Ended) <= forgetAfter // the clock may be set back
		return !recent && !slices.ContainsFunc(s.Causes, f.isOf)
	})
}

// recordEnd counts the end of a cause.
func recordEnd(flaps []Flap, c Cause, at time.Time) []Flap {
	i := slices.IndexFunc(flaps, func(f Flap) bool { return f.isOf(c) })
	if i < 0 {
		return append(flaps, Flap{Type: c.Type, Source: c.Source, Ended: at, Times: 1})
	}
	flaps[i].Ended = at
	flaps[i].Times = min(flaps[i].Times+1, maxFlaps)
	return flaps
}

// maxFlaps bounds the count: more makes no difference.
const maxFlaps = 16
