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
	failures           *prometheus.CounterVec
}

// step is a part of a prepare, as a reason why one failed.
type step string

const (
	stepState    step = "state"
	stepHardware step = "hardware"
	stepSharing  step = "sharing"
	stepCDI      step = "cdi"
)

// stepError is an error with the step that failed.
type stepError struct {
	error
	step step
}

func (e stepError) Unwrap() error { return e.error }

// failedAt returns the error with the step; nil for nil.
func failedAt(s step, err error) error {
	if err == nil {
		return nil
	}
	return stepError{err, s}
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
	failures := f.NewCounterVec(prometheus.CounterOpts{
		Name: "tessera_prepare_failures_total",
		Help: "Failed prepares of claims, by reason: held (another claim has the device), refused (no retry can mend it), stopped (time was over, or the claim was unprepared), " +
			"state (records on disk), hardware (MIG), sharing (MPS, compute mode, time slices), cdi, other. The kubelet tries again.",
	}, []string{"reason"})
	for _, r := range []string{"held", "refused", "stopped", string(stepState), string(stepHardware), string(stepSharing), string(stepCDI), "other"} {
		failures.WithLabelValues(r) // so that the first failure is an increase
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

func (m *metrics) prepared(start time.Time, err error) {
	m.prepare.WithLabelValues(result(err)).Observe(time.Since(start).Seconds())
	if err != nil {
		m.failures.WithLabelValues(result(err)).Inc()
	}
}

func (m *metrics) unprepared(start time.Time, err error) {
	m.unprepare.WithLabelValues(result(err)).Observe(time.Since(start).Seconds())
}

// result is the label of an outcome: success, or the reason of a failure.
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
	}
	if e, ok := errors.AsType[stepError](err); ok {
		return string(e.step)
	}
	return "other"
}
