package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tessera-dra/tessera/pkg/mps"
)

// healthTime is longer than a working supervisor ever takes to answer.
const healthTime = 3 * time.Second

// serveHTTP answers on the metrics and the health address until ctx ends; not on
// one that is empty.
func (s *Supervisor) serveHTTP(ctx context.Context) error {
	return errors.Join(
		s.listen(ctx, "--metrics-address", s.cfg.MetricsAddress, s.metricsHandler()),
		s.listen(ctx, "--health-address", s.cfg.HealthAddress, s.healthHandler()),
	)
}

// listen has handler answer on the address that the flag of that name gave.
func (s *Supervisor) listen(ctx context.Context, flag, address string, handler http.Handler) error {
	if address == "" {
		return nil
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	s.tasks.Go(func() { _ = server.Serve(l) }) // returns when it is closed
	context.AfterFunc(ctx, func() { _ = server.Close() })
	return nil
}

func (s *Supervisor) metricsHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(s.metrics.registry, promhttp.HandlerOpts{}))
	return mux
}

func (s *Supervisor) healthHandler() http.Handler {
	answer := func(check func(context.Context) error) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if err := check(r.Context()); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		}
	}
	mux := http.NewServeMux()
	mux.Handle("/healthz", answer(s.healthy))
	mux.Handle("/readyz", answer(s.ready))
	return mux
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
