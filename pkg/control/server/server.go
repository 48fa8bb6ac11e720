// Package server remembers what the API server stores and how the cluster's schedulers behave: it
// asks the server by probes, and weighs the answers of several servers.
package server

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tessera-dra/tessera/pkg/control/publish"
)

const (
	// probeEvery is how often the server is asked again if nothing suggests it: a
	// watch may go on through a load balancer while other servers are replaced.
	probeEvery = 10 * time.Minute
	// doubtEvery is how often it is asked while something is unknown.
	doubtEvery = time.Minute
	// ProbePause is the shortest time between two probes: many nodes that can't be
	// written would ask each for itself. It is also how soon a server that didn't
	// answer is asked again.
	ProbePause   = 10 * time.Second
	probeTimeout = 10 * time.Second
	// firstProbePause is that time as long as the server has never answered: then nothing
	// can be published.
	firstProbePause = time.Second
	// Steady is how long one answer must be the only one before it counts alone
	// again.
	Steady = 10 * time.Minute
	// DistrustTaintsFor is how long taints aren't used after a scheduler has ignored them.
	DistrustTaintsFor = 24 * time.Hour
)

// Prober is the port to the API server, a publish.Publisher: tests have servers that are upgraded,
// answer in turns, and fail.
type Prober interface {
	// Probe asks the server.
	Probe(ctx context.Context) (publish.Abilities, error)
	// Published returns the slices of this driver that are published.
	Published() ([]*resourceapi.ResourceSlice, error)
	// Watches receives a value after a watch has started.
	Watches() <-chan struct{}
}

// Server remembers which fields of slices the API server stores, and in which form.
type Server struct {
	prober Prober
	clock  clock.WithTicker

	mu    sync.Mutex
	known bool
	// able are the abilities for which pools are made.
	able publish.Abilities
	// answers are the different ones of the last minutes, each with the time when it
	// was last given, the latest at the end.
	answers []answer
	// alternating: an answer came back that another one had replaced.
	alternating bool
	// ignoredTaints is the time at which a scheduler last ignored taints, and the server's
	// version at that time.
	ignoredTaints struct {
		at      time.Time
		version string
	}
	probedAt  time.Time
	failed    error // of the last probe; nil: it succeeded
	listeners []chan event.GenericEvent
}

type answer struct {
	able publish.Abilities
	at   time.Time
}

// New returns a Server of which nothing is known yet.
func New(p Prober, c clock.WithTicker) *Server { return &Server{prober: p, clock: c} }

// Changes returns a channel that receives an event when the server gains or
// loses an ability. It must be called before all other methods.
func (s *Server) Changes() <-chan event.GenericEvent {
	c := make(chan event.GenericEvent, 1)
	s.listeners = append(s.listeners, c)
	return c
}

// Abilities returns what the server stores; the first time it asks the server. If that
// fails, all nodes have the same error for a moment: each tries again for itself.
func (s *Server) Abilities(ctx context.Context) (publish.Abilities, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed != nil && !s.known && s.clock.Since(s.probedAt) < firstProbePause {
		return publish.Abilities{}, s.failed
	}
	if !s.known {
		if err := s.probe(ctx); err != nil {
			return publish.Abilities{}, err
		}
	}
	return s.able, nil
}

// ProbeAgain asks the server again, unless that was done just now: because a pool
// could not be written, or because time has passed.
func (s *Server) ProbeAgain(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clock.Since(s.probedAt) < ProbePause {
		return nil
	}
	return s.probe(ctx)
}

// probe finds out the abilities, and notifies the listeners if they have changed.
func (s *Server) probe(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	s.probedAt = s.clock.Now()
	ctx, cancel := context.WithTimeout(ctx, probeTimeout) // others wait for this
	defer cancel()
	able, err := s.ask(ctx)
	s.failed = err
	if err != nil {
		return err
	}
	able = s.weigh(able)
	if s.ignoredTaints.version == able.Version && s.clock.Since(s.ignoredTaints.at) < DistrustTaintsFor {
		able.Taints = publish.No
	}
	if s.known && s.able == able {
		return nil
	}
	logger.Info("Found out what the API server stores", "resourceAPI", able.API, "counters", able.Counters.String(),
		"consumableCapacity", able.Multiple.String(), "taints", able.Taints.String(), "informationalTaints", able.InformationalTaints.String(),
		"kubernetes", able.Version, "chargesSharedDevices", able.Charged)
	if able.Doubt != "" {
		logger.Info("Some abilities of the API server are unknown; they aren't used, and are probed again every minute", "why", able.Doubt)
	}
	if s.known {
		s.notify()
	}
	s.known, s.able = true, able
	return nil
}

// ask asks the server. While it refuses the answer, its earlier one counts on, and the
// abilities that the published slices show: they would otherwise be withdrawn because of a
// webhook.
func (s *Server) ask(ctx context.Context) (publish.Abilities, error) {
	able, err := s.prober.Probe(ctx)
	if err != nil {
		return able, err
	}
	doubt := able.Doubt
	if n := len(s.answers); n > 0 {
		able = able.Or(s.answers[n-1].able)
	}
	if able.Doubt != "" {
		published, err := s.prober.Published()
		if err != nil {
			return able, fmt.Errorf("find out what the API server stores, which refuses the probes: %w", err)
		}
		able = able.OrShown(slices.Values(published))
	}
	if doubt != "" && able.Doubt == "" {
		klog.FromContext(ctx).Info("The API server refuses the probes; its earlier answers, and those that the published slices show, are kept", "why", doubt)
	}
	return able, nil
}

// notify sends an event to all listeners.
func (s *Server) notify() {
	for _, c := range s.listeners {
		select {
		case c <- event.GenericEvent{}:
		default: // one is waiting there
		}
	}
}

// DistrustTaints treats the server as one without taints for a while, because a scheduler
// ignores them. It reports whether taints were used until now.
func (s *Server) DistrustTaints() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.able.Taints != publish.Yes {
		return false
	}
	s.ignoredTaints.at, s.ignoredTaints.version = s.clock.Now(), s.able.Version
	s.able.Taints = publish.No
	s.notify()
	return true
}

// weigh returns the abilities that follow from the latest answer and those
// before. An answer that replaces another one counts alone: the server was
// upgraded, or rolled back. After one that comes back, servers that differ may be
// answering in turns. Until one of them has answered alone for a while, only what
// all of them have counts, so that pools neither change with each answer nor are
// refused by one of the servers.
func (s *Server) weigh(now publish.Abilities) publish.Abilities {
	at := s.clock.Now()
	s.answers = slices.DeleteFunc(s.answers, func(a answer) bool { return at.Sub(a.at) >= Steady })
	i := slices.IndexFunc(s.answers, func(a answer) bool { return a.able.Version == now.Version && a.able.SamePools(now) })
	if i >= 0 {
		s.alternating = s.alternating || i < len(s.answers)-1
		s.answers = slices.Delete(s.answers, i, i+1)
	}
	s.alternating = s.alternating && len(s.answers) > 0
	s.answers = append(s.answers, answer{now, at})
	if !s.alternating {
		return now
	}
	all := make([]publish.Abilities, len(s.answers))
	for i, a := range s.answers {
		all[i] = a.able
	}
	return publish.Common(all)
}

// Start asks again after each start of a watch, and from time to time. It runs in
// the leader only.
func (s *Server) Start(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.prober.Watches():
			// Not skipped where the server was just asked: that may have been another one.
			if !s.wait(ctx, s.pause()) {
				return nil
			}
		case <-s.clock.After(s.interval()):
		}
		if err := s.ProbeAgain(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "The API server could not be asked; that is tried again")
		}
	}
}

func (s *Server) wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-s.clock.After(d):
		return true
	}
}

// pause returns how long to wait before the next probe; 0 or less: not at all.
func (s *Server) pause() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return ProbePause - s.clock.Since(s.probedAt)
}

// interval returns how long to wait for a watch to start before the next probe.
func (s *Server) interval() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.failed != nil:
		return ProbePause
	case s.known && s.able.Doubt != "":
		return doubtEvery
	}
	return probeEvery
}
