package partition

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// metrics are what is counted; visit.measure and visit.end observe them.
type metrics struct {
	hardware, own *prometheus.HistogramVec
}

func newMetrics(registerer prometheus.Registerer, j *journal.Journal) *metrics {
	f := promauto.With(registerer)
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tessera_mig_partitions",
		Help: "MIG partitions that exist because Tessera made them, idle ones included.",
	}, func() float64 {
		n := 0
		for _, r := range j.GPUs() {
			n += len(r.Partitions)
		}
		return float64(n)
	})
	return &metrics{
		hardware: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tessera_mig_hardware_duration_seconds",
			Help:    "Time that the hardware and its driver took, by operation: look, create, destroy, mode; and result: success, in_use, no_room, lost, error.",
			Buckets: []float64{.001, .005, .01, .025, .05, .1, .2, .3, .5, .75, 1, 1.5, 2, 3, 5, 10, 20},
		}, []string{"op", "result"}),
		own: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "tessera_mig_own_duration_seconds",
			Help:    "Time of an operation on a GPU's partitions less what the hardware took and less the wait for another operation on the GPU, by operation: make, find, release, whole, sweep, recover, leave; and result: as of the hardware, and stopped.",
			Buckets: []float64{.0005, .001, .002, .003, .005, .0075, .01, .015, .02, .05, .1, .5, 1},
		}, []string{"op", "result"}),
	}
}
