package publish

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/utils/ptr"

	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// Answer is the result of asking a server for an ability.
type Answer int8

const (
	// Unknown: the server refuses the question and no published slice shows the answer, or
	// servers answer differently. Nothing that needs the ability is published, and the
	// server is asked again soon.
	Unknown Answer = iota
	// No: the server doesn't have it.
	No
	// Yes: the server has it.
	Yes
)

// String is the name in logs.
func (a Answer) String() string { return [...]string{"unknown", "no", "yes"}[a] }

// Abilities are the fields of slices that a server stores besides plain devices, and
// whether its scheduler handles them correctly. The zero value is a server of which
// nothing is known.
type Abilities struct {
	Counters Counters
	// Multiple: devices that can be allocated several times, and policies for the
	// amounts of their capacities that claims may request.
	Multiple Answer
	// Taints of devices, at most four a device.
	Taints Answer
	// InformationalTaints: taints with the effect None.
	InformationalTaints Answer
	// Charged: the scheduler of this version charges counters for devices that are
	// allocated several times (pkg/allocator).
	Charged bool
	// Version of Kubernetes as the server spells it; empty where it doesn't say.
	Version string
	// API is the version of resource.k8s.io by which slices are written.
	API string
	// Doubt has the reason why something is unknown, and the remedy: complete sentences.
	// It is empty if everything is known.
	Doubt string
}

// HasCounters reports whether shared counters are known to be stored.
func (a Abilities) HasCounters() bool {
	return a.Counters == JointCounters || a.Counters == SplitCounters
}

// ForOffers returns the abilities as offers need them: those that are unknown aren't
// used.
func (a Abilities) ForOffers() offer.Server {
	s := offer.Server{Counters: a.HasCounters(), Multiple: a.Multiple == Yes && allocator.CountsCapacity(a.Version), Charged: a.Charged, Version: a.Version}
	if a.Taints == Yes {
		s.MaxTainted = a.Counters.MaxTainted()
		s.InformationalTaints = a.InformationalTaints == Yes && allocator.HeedsEffectNone(a.Version)
	}
	if a.Counters == UnknownCounters {
		s.CountersDoubt = a.Doubt
	}
	if a.Multiple == Unknown {
		s.MultipleDoubt = a.Doubt
	}
	return s
}

// Or returns a with answers of before, an earlier result for the same server,
// where a has none. They don't count if the server's minor version has changed since:
// a patch release adds and removes no fields.
func (a Abilities) Or(before Abilities) Abilities {
	switch {
	case a.Version == "":
		a.Version, a.Charged = before.Version, before.Charged
	case minor(a.Version) != minor(before.Version):
		return a
	}
	return a.orKnown(before)
}

// OrShown returns a with the abilities that published slices of this driver show, where a
// has no answer: a server that has stored a field stores it. Slices in a form of counters
// that a's version doesn't store show nothing about counters.
func (a Abilities) OrShown(published iter.Seq[*resourceapi.ResourceSlice]) Abilities {
	var shown Abilities
	for s := range published {
		if s.Labels[ManagedByLabel] != ManagedBy {
			continue
		}
		one := shownBy(s)
		if form := formOf(a.Version); form != UnknownCounters && one.Counters != form {
			one.Counters = UnknownCounters
		}
		shown.Counters = max(shown.Counters, one.Counters)
		shown = shown.orKnown(one)
	}
	return a.orKnown(shown)
}

// shownBy returns the abilities that one slice shows. All others are unknown.
func shownBy(s *resourceapi.ResourceSlice) (shown Abilities) {
	if trimmed, ok := s.Annotations[shownKey]; ok {
		_, _ = fmt.Sscan(trimmed, &shown.Counters, &shown.Multiple, &shown.Taints, &shown.InformationalTaints)
		return shown
	}
	consumes := func(d resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }
	switch counters := len(s.Spec.SharedCounters) > 0; {
	case counters && len(s.Spec.Devices) > 0:
		shown.Counters = JointCounters
	case counters || slices.ContainsFunc(s.Spec.Devices, consumes):
		shown.Counters = SplitCounters
	}
	for _, d := range s.Spec.Devices {
		if ptr.Deref(d.AllowMultipleAllocations, false) {
			shown.Multiple = Yes
		}
		for _, t := range d.Taints {
			shown.Taints = Yes
			if t.Effect == resourceapi.DeviceTaintEffectNone {
				shown.InformationalTaints = Yes
			}
		}
	}
	return shown
}

// textOfShown returns the abilities that a slice shows as shownBy reads them; empty if it
// shows none.
func textOfShown(s *resourceapi.ResourceSlice) string {
	shown := shownBy(s)
	if shown == (Abilities{}) {
		return ""
	}
	return fmt.Sprintf("%d %d %d %d", shown.Counters, shown.Multiple, shown.Taints, shown.InformationalTaints)
}

// formOf returns the form in which servers of a version store counters, if they do;
// UnknownCounters for a version that can't be parsed.
func formOf(gitVersion string) Counters {
	v, err := version.ParseSemantic(gitVersion)
	switch {
	case err != nil:
		return UnknownCounters
	case v.AtLeast(version.MustParseSemantic("1.35.0-alpha.0")):
		return SplitCounters
	}
	return JointCounters
}

// minor returns the part of a version that patch releases have in common; all of it if it
// can't be parsed.
func minor(gitVersion string) string {
	v, err := version.ParseSemantic(gitVersion)
	if err != nil {
		return gitVersion
	}
	return fmt.Sprintf("%d.%d", v.Major(), v.Minor())
}

// orKnown returns a with the answers of b where a has none.
func (a Abilities) orKnown(b Abilities) Abilities {
	if a.Counters == UnknownCounters {
		a.Counters = b.Counters
	}
	for _, x := range []struct {
		to   *Answer
		from Answer
	}{{&a.Multiple, b.Multiple}, {&a.Taints, b.Taints}, {&a.InformationalTaints, b.InformationalTaints}} {
		if *x.to == Unknown {
			*x.to = x.from
		}
	}
	if a.Counters != UnknownCounters && a.Multiple != Unknown && a.Taints != Unknown && a.InformationalTaints != Unknown {
		a.Doubt = ""
	}
	return a
}

// SamePools reports whether the same pools can be published with both.
func (a Abilities) SamePools(b Abilities) bool {
	return a.Counters == b.Counters && a.Multiple == b.Multiple && a.Taints == b.Taints && a.InformationalTaints == b.InformationalTaints && a.Charged == b.Charged
}

// Common returns the abilities that all of several servers of one cluster have,
// whatever the order of the servers. The others are unknown, because they depend on
// the server that answers.
func Common(all []Abilities) Abilities {
	all = slices.SortedFunc(slices.Values(all), func(a, b Abilities) int { return cmp.Or(cmp.Compare(a.Version, b.Version), cmp.Compare(a.API, b.API)) })
	out := all[0]
	versions, apis := []string{orUnknown(out.Version)}, []string{out.API}
	for _, b := range all[1:] {
		if out.Counters != b.Counters {
			out.Counters = UnknownCounters
		}
		out.Multiple, out.Taints, out.InformationalTaints = common(out.Multiple, b.Multiple), common(out.Taints, b.Taints), common(out.InformationalTaints, b.InformationalTaints)
		if out.Charged && !b.Charged {
			out.Charged, out.Version = false, b.Version
		}
		versions, apis = append(versions, orUnknown(b.Version)), append(apis, b.API)
	}
	out.API = strings.Join(slices.Compact(apis), ", ")
	out.Doubt = fmt.Sprintf("API servers with different abilities answer in turns (%s), as during an upgrade of the control plane. "+
		"Finish the upgrade, and set the same feature gates on all API servers. Until ten minutes after that, only what all of them store is used.",
		strings.Join(slices.Compact(versions), ", "))
	return out
}

func common(a, b Answer) Answer {
	if a == b {
		return a
	}
	return Unknown
}

func orUnknown(version string) string { return cmp.Or(version, "an unknown version") }
