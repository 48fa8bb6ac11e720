package driver

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/node/facts"
)

func registerMetrics(registerer prometheus.Registerer, f *facts.Facts) {
	gauge := func(name, help string, value func(facts.Listing) int) {
		promauto.With(registerer).NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			state, _ := f.State()
			return float64(value(state.Listing))
		})
	}
	gauge("tessera_gpus_listed", "GPUs that NVML lists.", func(l facts.Listing) int { return l.Listed })
	gauge("tessera_gpus_identified", "GPUs that NVML lists and that are identified, by their answer or from an earlier one.",
		func(l facts.Listing) int { return l.Identified })
}
