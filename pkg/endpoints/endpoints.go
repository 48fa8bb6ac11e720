// Package endpoints serves what the kubelet's probes and Prometheus ask a program for.
package endpoints

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
	"golang.org/x/sync/errgroup"
)

// Server serves requests at one address.
type Server struct {
	// Flag is the name of the flag that gave the address, for errors.
	Flag string
	// Address is host:port; empty or "0": nothing is served.
	Address string
	Handler http.Handler
	// TLS, which may be nil, makes the server speak TLS.
	TLS *tls.Config
}

// NewRegistry returns a registry with the metrics of the process; others add theirs.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// Metrics returns the server of /metrics. One metric that can't be collected leaves the others.
func Metrics(address string, from prometheus.Gatherer) Server {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(from, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	return Server{Flag: "--metrics-address", Address: address, Handler: mux}
}

// Health returns the server of /healthz and /readyz, which answer with the error of a check that
// fails.
func Health(address string, healthy, ready func(context.Context) error) Server {
	mux := http.NewServeMux()
	mux.Handle("/healthz", probe(healthy))
	mux.Handle("/readyz", probe(ready))
	return Server{Flag: "--health-address", Address: address, Handler: mux}
}

func probe(check func(context.Context) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := check(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	}
}

// Serve serves while work does a program's work. work's context ends with ctx, and if a server
// fails. Serve returns when work and the servers have ended.
func Serve(ctx context.Context, work func(context.Context) error, servers ...Server) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range servers {
		group.Go(func() error { return s.serve(ctx) })
	}
	err := work(ctx)
	stop()
	return errors.Join(group.Wait(), err)
}

func (s Server) serve(ctx context.Context) error {
	if s.Address == "" || s.Address == "0" {
		return nil
	}
	l, err := net.Listen("tcp", s.Address) //nolint:noctx // it doesn't wait; with the context, its end would be an error
	if err != nil {
		return fmt.Errorf("%s: %w", s.Flag, err)
	}
	if s.TLS != nil {
		l = tls.NewListener(l, s.TLS)
	}
	server := &http.Server{Handler: s.Handler, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("%s: serve %s: %w", s.Flag, s.Address, err)
	}
	return nil
}
