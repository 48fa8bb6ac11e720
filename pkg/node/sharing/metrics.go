package sharing

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/mps"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// metrics has the metrics that a Manager observes, in Manager.observe.
type metrics struct {
	calls *prometheus.HistogramVec
}

func newMetrics(registerer prometheus.Registerer, m *Manager) *metrics {
	f := promauto.With(registerer)
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_mps_daemons",
		Help: "MPS daemons that the node's supervisor has.",
	}, func() float64 { return float64(m.count(func(mps.State) bool { return true })) })
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_mps_daemons_not_running",
		Help: "Those of the MPS daemons that take no clients now.",
	}, func() float64 { return float64(m.count(func(s mps.State) bool { return s.Phase != mps.Running })) })
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_gpu_settings_changed",
		Help: "GPUs whose compute mode or time slice Tessera has changed for claims.",
	}, func() float64 { return float64(len(m.cfg.Journal.AllSettings())) })
	return &metrics{
		calls: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tessera_sharing_call_duration_seconds",
			Help:    "Time that the MPS supervisor and the driver took to have a GPU shared, by operation: ensure, stop, beginStop, mode, timeslice; and result: success, unavailable, unsupported, stopped, error.",
			Buckets: []float64{.001, .0025, .005, .01, .02, .03, .04, .05, .06, .08, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"op", "result"}),
	}
}

// count counts the daemons of a kind.
func (m *Manager) count(is func(mps.State) bool) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, s := range m.watch.found {
		if is(s) {
			n++
		}
	}
	return n
}

// observe measures a call of the supervisor or the driver that has ended with err.
func (m *Manager) observe(op string, began time.Time, err error) {
	m.metrics.calls.WithLabelValues(op, result(err)).Observe(time.Since(began).Seconds())
}

// result is the label of an outcome.
func result(err error) string {
	switch {
	case err == nil:
		return "success"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "stopped"
	case errors.Is(err, mps.ErrUnavailable):
		return "unavailable"
	case errors.Is(err, errNoTimeSlices), errors.Is(err, nvml.ErrNotSupported):
		return "unsupported"
	default:
		return "error"
	}
}
