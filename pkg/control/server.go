package control

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tessera-dra/tessera/pkg/control/publish"
)

const (
	// probeEvery is how often the server is asked again: it may have been upgraded,
	// or a feature gate switched. The question is a dry run.
	probeEvery = 10 * time.Minute
	// probePause keeps many nodes that can't be written from asking each for
	// itself.
	probePause   = 10 * time.Second
	probeTimeout = 10 * time.Second
)

// prober has the methods of publish.Publisher that a server needs.
type prober interface {
	Probe(ctx context.Context) (publish.Abilities, error)
}

// apiServer remembers what the API server stores of slices, and in which form.
type apiServer struct {
	prober prober
	clock  clock.WithTicker

	mu        sync.Mutex
	known     bool
	able      publish.Abilities
	probedAt  time.Time
	listeners []chan event.GenericEvent
}

func newAPIServer(p prober) *apiServer { return &apiServer{prober: p, clock: clock.RealClock{}} }

// changes returns a channel that receives an event when the server gains or
// loses an ability. It must be called before all other methods.
func (s *apiServer) changes() <-chan event.GenericEvent {
	c := make(chan event.GenericEvent, 1)
	s.listeners = append(s.listeners, c)
	return c
}

// abilities returns what the server stores; the first time it asks the server.
func (s *apiServer) abilities(ctx context.Context) (publish.Abilities, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.known {
		if err := s.probe(ctx); err != nil {
			return publish.Abilities{}, err
		}
	}
	return s.able, nil
}

// probeAgain asks the server again, unless that was done just now: because a pool
// could not be written, or because time has passed.
func (s *apiServer) probeAgain(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clock.Since(s.probedAt) < probePause {
		return nil
	}
	return s.probe(ctx)
}

// probe finds out the abilities, and notifies the listeners if they have changed.
// A refusal counts only as the first answer: after an earlier answer it says
// nothing about the server.
func (s *apiServer) probe(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	s.probedAt = s.clock.Now()
	ctx, cancel := context.WithTimeout(ctx, probeTimeout) // others wait for this
	defer cancel()
	able, err := s.prober.Probe(ctx)
	switch {
	case err != nil && (s.known || !refused(err)):
		return err
	case err != nil:
		logger.Error(err, "The API server refuses dry runs of ResourceSlices; GPUs are offered as on a server that stores neither counters nor consumable capacity")
	}
	if s.known && s.able == able {
		return nil
	}
	logger.Info("Found out what the API server stores", "counters", able.Counters.String(), "consumableCapacity", able.Multiple,
		"kubernetes", able.Version, "chargesSharedDevices", able.Charged)
	if s.known {
		for _, c := range s.listeners {
			select {
			case c <- event.GenericEvent{}:
			default: // one is waiting there
			}
		}
	}
	s.known, s.able = true, able
	return nil
}

// refused says that trying again won't help: the server has answered, and the
// answer isn't that it is busy.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return errors.Is(err, publish.ErrProbeRefused)
	}
	switch code := int(status.Status().Code); code {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusConflict, http.StatusTooManyRequests:
		return false
	default:
		return code >= http.StatusBadRequest && code < http.StatusInternalServerError
	}
}

// Start asks again from time to time. It runs in the leader only.
func (s *apiServer) Start(ctx context.Context) error {
	ticker := s.clock.NewTicker(probeEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		if err := s.probeAgain(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "The API server could not be asked; that is tried again")
		}
	}
}
