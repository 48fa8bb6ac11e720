package supervisor

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/endpoints"
	"github.com/tessera-dra/tessera/pkg/mps"
)

// metrics has the metrics that a supervisor observes.
type metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.HistogramVec
	phases   *prometheus.HistogramVec
	restarts prometheus.Counter
}

func newMetrics(s *Supervisor) *metrics {
	registry := endpoints.NewRegistry()
	f := promauto.With(registry)
	for _, phase := range []mps.Phase{mps.Running, mps.Starting, mps.Failed, mps.Ending} {
		f.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "tessera_mps_supervisor_daemons", Help: "MPS control daemons, by phase.",
			ConstLabels: prometheus.Labels{"phase": string(phase)},
		}, func() float64 { return s.count(func(d mps.State) bool { return d.Phase == phase }) })
	}
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_mps_supervisor_daemons_in_trouble",
		Help: "MPS control daemons that run and take no clients: they don't answer, or their server doesn't start.",
	}, func() float64 {
		return s.count(func(d mps.State) bool { return d.Phase == mps.Running && d.Trouble != "" })
	})
	buckets := []float64{.001, .0025, .005, .01, .02, .03, .04, .05, .06, .08, .1, .25, .5, 1, 2.5, 5, 10}
	return &metrics{
		registry: registry,
		calls: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tessera_mps_supervisor_call_duration_seconds", Buckets: buckets,
			Help: "Time that calls of the kubelet plugin took, by verb (start, stop) and result (success, stopped, error).",
		}, []string{"verb", "result"}),
		phases: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tessera_mps_supervisor_phase_duration_seconds", Buckets: buckets,
			Help: "Time that the phases of starting a daemon (record, clean, launch, limits, admit) and of stopping one (end, remove) took.",
		}, []string{"phase"}),
		restarts: f.NewCounter(prometheus.CounterOpts{
			Name: "tessera_mps_supervisor_daemon_restarts_total",
			Help: "How often daemons were started again because they had ended, or because they got no server.",
		}),
	}
}

// count counts the daemons of a kind.
func (s *Supervisor) count(is func(mps.State) bool) float64 {
	n := 0
	for _, d := range s.list().Daemons {
		if is(d) {
			n++
		}
	}
	return float64(n)
}

func (m *metrics) observe(verb string, began time.Time, err error) {
	result := "success"
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		result = "stopped"
	case err != nil:
		result = "error"
	}
	m.calls.WithLabelValues(verb, result).Observe(time.Since(began).Seconds())
}

// stopwatch measures the phases of one operation.
type stopwatch struct {
	m    *metrics
	last time.Time
}

func (m *metrics) stopwatch() *stopwatch { return &stopwatch{m: m, last: time.Now()} }

// done ends a phase; the next one begins.
func (w *stopwatch) done(phase string) {
	now := time.Now()
	w.m.phases.WithLabelValues(phase).Observe(now.Sub(w.last).Seconds())
	w.last = now
}
