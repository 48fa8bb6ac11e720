package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"github.com/tessera-dra/tessera/pkg/scrapeauth"
)

// newRegistry has the metrics of the process; others add theirs.
func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// stuckAfter is how long the driver's loop, or a call of the kubelet, may go on
// before the plugin counts as stuck. Neither takes as long because of one GPU that
// doesn't respond.
const stuckAfter = 3 * time.Minute

// metricsHandler serves /metrics. One metric that can't be collected leaves the others.
func metricsHandler(gatherer prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(gatherer, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	return mux
}

// healthHandler serves /healthz and /readyz.
func healthHandler(healthy, ready func() error) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/healthz", probe(healthy))
	mux.Handle("/readyz", probe(ready))
	return mux
}

// serveMetrics answers until ctx ends, over TLS and only to those who may ask if that is
// configured.
func (p *program) serveMetrics(ctx context.Context) error {
	handler := metricsHandler(prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return p.metrics().Gather() }))
	var secure *tls.Config
	if p.cfg.MetricsAuthentication {
		var err error
		if secure, err = scrapeauth.TLSConfig(); err != nil {
			return err
		}
		handler = scrapeauth.Handler(p.client, handler)
	}
	return serve(ctx, "--metrics-address", p.cfg.MetricsAddress, secure, handler)
}

// serveHealth answers until ctx ends.
func (p *program) serveHealth(ctx context.Context) error {
	return serve(ctx, "--health-address", p.cfg.HealthAddress, nil, healthHandler(p.healthy, p.ready))
}

// serve answers on address, which the flag of that name gave, until ctx ends, over TLS if
// there is a configuration for it; it returns at once if the address is empty.
func serve(ctx context.Context, flag, address string, secure *tls.Config, handler http.Handler) error {
	if address == "" {
		return nil
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	if secure != nil {
		l = tls.NewListener(l, secure)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%s: serve %s: %w", flag, address, err)
	}
	return nil
}

func probe(check func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
}
