package prepare

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// metrics are what is counted.
type metrics struct {
	prepare, unprepare *prometheus.HistogramVec
}

func newMetrics(registerer prometheus.Registerer, j *journal.Journal) *metrics {
	f := promauto.With(registerer)
	buckets := []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 40, 60}
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_prepared_claims",
		Help: "Claims that are prepared on this node.",
	}, func() float64 { return float64(j.Len()) })
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_unreadable_journal_files",
		Help: "Journal files that could not be read, were renamed, and still affect GPUs.",
	}, func() float64 { return float64(len(j.Unreadable())) })
	return &metrics{
		prepare: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tessera_prepare_duration_seconds",
			Help:    "Time to prepare one claim, waiting for its devices included, by result: success, held, refused (no retry can mend it), stopped, error.",
			Buckets: buckets,
		}, []string{"result"}),
		unprepare: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tessera_unprepare_duration_seconds",
			Help:    "Time to unprepare one claim, by result: success, stopped, error.",
			Buckets: buckets,
		}, []string{"result"}),
	}
}

func (m *metrics) prepared(start time.Time, err error) {
	m.prepare.WithLabelValues(result(err)).Observe(time.Since(start).Seconds())
}

func (m *metrics) unprepared(start time.Time, err error) {
	m.unprepare.WithLabelValues(result(err)).Observe(time.Since(start).Seconds())
}

// result is the label of an outcome.
func result(err error) string {
	switch {
	case err == nil:
		return "success"
	case errors.Is(err, ErrHeld):
		return "held"
	case errors.Is(err, claim.ErrPermanent):
		return "refused"
	case errors.Is(err, errUnprepared), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "stopped"
	default:
		return "error"
	}
}
