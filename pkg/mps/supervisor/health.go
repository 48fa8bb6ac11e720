package supervisor

import (
	"context"
	"errors"
	"time"

	"github.com/tessera-dra/tessera/pkg/endpoints"
	"github.com/tessera-dra/tessera/pkg/mps"
)

// healthTime is longer than a working supervisor ever takes to answer.
const healthTime = 3 * time.Second

// servers are those of metrics and of the kubelet's probes.
func (s *Supervisor) servers() []endpoints.Server {
	return []endpoints.Server{
		endpoints.Metrics(s.cfg.MetricsAddress, s.metrics.registry),
		endpoints.Health(s.cfg.HealthAddress, s.healthy, s.ready),
	}
}

// ready returns an error that says why daemons can't be started yet.
func (s *Supervisor) ready(ctx context.Context) error {
	if !s.serving.Load() {
		return errors.New("not serving yet: another supervisor has the run directory, or the daemons that are there are being adopted")
	}
	return s.healthy(ctx)
}

// healthy makes a call over the socket, as the plugin does. A supervisor that waits
// for another one to end is healthy.
func (s *Supervisor) healthy(ctx context.Context) error {
	if !s.serving.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, healthTime)
	defer cancel()
	client, err := mps.Dial(s.cfg.runDir().Socket())
	if err != nil {
		return err
	}
	_, err = client.List(ctx)
	return err
}
