package driver

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/node/facts"
)

func registerMetrics(registerer prometheus.Registerer, f *facts.Facts) {
	for _, m := range []struct {
		name, help string
		value      func(facts.Listing) int
	}{
		{"tessera_gpus_listed", "GPUs that NVML lists.", func(l facts.Listing) int { return l.Listed }},
		{"tessera_gpus_identified", "GPUs that NVML lists and that are identified, by their answer or from an earlier one.", func(l facts.Listing) int { return l.Identified }},
	} {
		promauto.With(registerer).NewGaugeFunc(prometheus.GaugeOpts{Name: m.name, Help: m.help}, func() float64 {
			state, _ := f.State()
			return float64(m.value(state.Listing))
		})
	}
}
