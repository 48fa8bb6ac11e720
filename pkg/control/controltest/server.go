package controltest

import (
	"cmp"
	"context"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// Server answers probes as an API server that stores counters in some form, or none, and
// consumable capacity or not.
type Server struct {
	Form     publish.Counters
	Multiple bool
	Charged  bool
	Taints   bool
	Version  string // empty: v1.36.1
	Doubt    string // nothing else is found out
	Err      error
	Asked    int
	// WatchStarts receives a value for each watch that starts.
	WatchStarts chan struct{}
	// Slices, if it isn't nil, returns the published slices, or why they can't be read.
	Slices func() ([]*resourceapi.ResourceSlice, error)
}

// NoVersion is the version of a server that doesn't report any.
const NoVersion = "none"

// Probe returns what the server stores.
func (s *Server) Probe(context.Context) (publish.Abilities, error) {
	s.Asked++
	able := publish.Abilities{
		Counters: cmp.Or(s.Form, publish.NoCounters), Multiple: publish.No, Taints: publish.No, InformationalTaints: publish.No,
		Charged: s.Charged, Version: cmp.Or(s.Version, "v1.36.1"),
	}
	if s.Multiple {
		able.Multiple = publish.Yes
	}
	if s.Taints {
		able.Taints, able.InformationalTaints = publish.Yes, publish.Yes
	}
	if s.Doubt != "" {
		able = publish.Abilities{Charged: able.Charged, Version: able.Version, Doubt: s.Doubt}
	}
	if able.Version == NoVersion {
		able.Version, able.Charged = "", false
	}
	return able, s.Err
}

// Published returns the slices that are published.
func (s *Server) Published() ([]*resourceapi.ResourceSlice, error) {
	if s.Slices == nil {
		return nil, nil
	}
	return s.Slices()
}

// Watches receives a value for each watch that starts.
func (s *Server) Watches() <-chan struct{} { return s.WatchStarts }
