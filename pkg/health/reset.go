package health

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// maxResets is how many resets of a GPU are tried in resetsWithin.
	maxResets    = 3
	resetsWithin = 24 * time.Hour
)

// resetPause is the least time between the beginnings of two resets, by how many were
// tried before the second.
func resetPause(tried int) time.Duration {
	if tried < 2 {
		return time.Minute
	}
	return 10 * time.Minute
}

// Reset is an attempt to reset the GPU.
type Reset struct {
	// Began is stored before the attempt.
	Began time.Time `json:"began"`
	// Ended is zero until the attempt has ended. It stays zero if the plugin ended
	// during the attempt.
	Ended time.Time `json:"ended,omitzero"`
	// Error says why the attempt failed, as a clause.
	Error string `json:"error,omitempty"`
	// Permanent: another attempt would fail, too.
	Permanent bool `json:"permanent,omitempty"`

	extra map[string]json.RawMessage
}

// ResetFacts is the basis of a decision to reset a GPU, besides its State.
type ResetFacts struct {
	GPU gpu.UUID
	At  time.Time
	// Recovery is the recovery action in the last reading, which must be recent.
	Recovery gpu.RecoveryAction
	// Conditions of the GPU, of all sources.
	Conditions []gpu.Condition
	// Allowed: a policy lets the plugin reset the GPU.
	Allowed bool
	// Claims are those that have the GPU or a part of it.
	Claims []string
	// MIGOfOthers: the GPU has a MIG configuration that a reset ends and that wouldn't be
	// restored.
	MIGOfOthers bool
}

// ResetPlan is the decision about a GPU for which ResetRequired is open.
type ResetPlan struct {
	// Now: the plugin must reset the GPU now.
	Now bool
	// Message explains the next step, or the one of an admin, as a clause; empty if the
	// condition says enough. It doesn't change with time.
	Message string
}

// PlanReset decides whether the plugin resets the GPU. The zero plan is that of a GPU
// that needs no reset.
func (s State) PlanReset(x ResetFacts) ResetPlan {
	isOpen := slices.ContainsFunc(s.Causes, func(c Cause) bool { return c.Open() && c.Type == gpu.ResetRequired })
	if !isOpen || x.Recovery == gpu.RecoveryNone { // it ends with the next reading
		return ResetPlan{}
	}
	if message := s.whyByHand(x); message != "" {
		return ResetPlan{Message: message}
	}
	tried := s.resetsSince(x.At)
	switch {
	case len(x.Claims) > 0:
		return ResetPlan{Message: "Tessera resets it when no claim has any of it; these have: " + firstOf(x.Claims)}
	case len(tried) > 0 && x.At.Sub(tried[len(tried)-1].Began) < resetPause(len(tried)):
		return ResetPlan{Message: tried[len(tried)-1].outcome() + "; Tessera tries again"}
	}
	return ResetPlan{Now: true, Message: "Tessera is resetting it"}
}

// whyByHand returns why the plugin doesn't reset the GPU, and the remedy; empty if the
// plugin may reset it.
func (s State) whyByHand(x ResetFacts) string {
	byHand := fmt.Sprintf("end all programs on it and the node's kubelet plugin and reset it (nvidia-smi --gpu-reset -i %s), or reboot the node", x.GPU)
	if !x.Allowed {
		return byHand + "; Tessera resets it where a SharingPolicy has health.reset: WhenIdle"
	}
	for _, c := range x.Conditions {
		if needsMoreThanReset(c.Type) {
			return fmt.Sprintf("Tessera doesn't reset it while it has the condition %s, too", c.Type)
		}
	}
	tried := s.resetsSince(x.At)
	switch {
	case x.Recovery != gpu.RecoveryReset && x.Recovery != gpu.RecoveryDrainAndReset:
		return "the driver doesn't say that a reset helps, so Tessera doesn't reset it; " + byHand
	case x.MIGOfOthers:
		return "Tessera doesn't reset it, because that would end a MIG configuration that Tessera didn't make; " + byHand
	case len(tried) > 0 && tried[len(tried)-1].Permanent:
		return tried[len(tried)-1].outcome() + "; " + byHand
	case len(tried) >= maxResets:
		return fmt.Sprintf("Tessera has tried to reset it %d times in a day: %s; reboot the node, and have the GPU examined", len(tried), tried[len(tried)-1].outcome())
	}
	return ""
}

// needsMoreThanReset reports whether a GPU with the condition can't be helped by a
// reset, or whether it isn't known what uses it.
func needsMoreThanReset(t gpu.ConditionType) bool {
	return slices.Contains([]gpu.ConditionType{
		gpu.Lost, gpu.NotResponding, gpu.Unreadable, gpu.BusResetRequired, gpu.RebootRequired, gpu.PeersMustDrain, gpu.StateUnreadable,
	}, t)
}

// BeginReset returns the state in which a reset begins. It must be stored before the
// GPU is reset.
func (s State) BeginReset(at time.Time) State {
	s.Resets = append(s.resetsSince(at), Reset{Began: at})
	return s
}

// EndReset returns the state after the reset that began last; failed is nil if it
// succeeded. permanent: another attempt would fail, too.
func (s State) EndReset(at time.Time, failed error, permanent bool) State {
	s.Resets = slices.Clone(s.Resets)
	if len(s.Resets) == 0 {
		return s
	}
	last := &s.Resets[len(s.Resets)-1]
	last.Ended, last.Permanent = at, permanent
	if failed != nil {
		last.Error = failed.Error()
	}
	return s
}

// resetsSince returns the resets that count at a time, the last one at the end. One that
// began later doesn't: the clock was set back.
func (s State) resetsSince(at time.Time) []Reset {
	var recent []Reset
	for _, r := range s.Resets {
		if age := at.Sub(r.Began); age >= 0 && age < resetsWithin {
			recent = append(recent, r)
		}
	}
	return recent
}

// outcome says how the attempt ended, as a clause.
func (r Reset) outcome() string {
	switch {
	case r.Ended.IsZero():
		return "the plugin ended while it reset the GPU"
	case r.Error != "":
		return "the reset failed: " + r.Error
	}
	return "it was reset, and the driver asks again"
}

// firstOf lists the first few of many.
func firstOf(all []string) string {
	const most = 3
	all = slices.Sorted(slices.Values(all))
	if len(all) <= most {
		return strings.Join(all, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(all[:most], ", "), len(all)-most)
}
