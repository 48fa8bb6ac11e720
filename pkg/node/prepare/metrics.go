package prepare

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// metrics are what is counted; preparer.go observes them.
type metrics struct {
	prepare, unprepare *prometheus.HistogramVec
	failures           *prometheus.CounterVec
}

func newMetrics(registerer prometheus.Registerer, j *journal.Journal) *metrics {
	f := promauto.With(registerer)
	buckets := []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 40, 60}
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_prepared_claims",
		Help: "Claims that are prepared on this node.",
	}, func() float64 { return float64(len(j.Claims().Readable())) })
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_unreadable_journal_files",
		Help: "Journal files that could not be read, were renamed, and still affect GPUs.",
	}, func() float64 { return float64(len(j.Claims().Unreadable())) })
	failures := f.NewCounterVec(prometheus.CounterOpts{
		Name: "tessera_prepare_failures_total",
		Help: "Failed prepares of claims, by reason: held (another claim has the device), refused (no retry can mend it), stopped (time was over, or the claim was unprepared), " +
			"state (records on disk), hardware (MIG), sharing (MPS, compute mode, time slices), cdi, other; " +
			"and by class, whose failure it is: device, node, claim, moment (it may be over at the next try). The kubelet tries again.",
	}, []string{"reason", "class"})
	for reason, classes := range classesOf() {
		for _, c := range classes {
			failures.WithLabelValues(reason, string(c)) // so that the first failure is an increase
		}
	}
	return &metrics{
		failures: failures,
		prepare: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tessera_prepare_duration_seconds",
			Help:    "Time to prepare one claim, waiting for its devices included, by result: success, or the reason of the failure as in tessera_prepare_failures_total.",
			Buckets: buckets,
		}, []string{"result"}),
		unprepare: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tessera_unprepare_duration_seconds",
			Help:    "Time to unprepare one claim, by result: success, or the reason of the failure as in tessera_prepare_failures_total.",
			Buckets: buckets,
		}, []string{"result"}),
	}
}
