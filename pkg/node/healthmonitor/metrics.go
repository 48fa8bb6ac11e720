package healthmonitor

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/health"
)

// metrics of a Monitor.
type metrics struct {
	xids *prometheus.CounterVec
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	return &metrics{
		xids: promauto.With(registerer).NewCounterVec(prometheus.CounterOpts{
			Name: "tessera_gpu_xids_total",
			Help: "XIDs that the driver reported since the plugin started, by GPU and code; other: NVIDIA's catalog doesn't have the code.",
		}, []string{"uuid", "code"}),
	}
}

// codeLabel keeps the number of values at that of the catalog.
func codeLabel(code uint64) string {
	if health.Lookup(code).Mnemonic == "" {
		return "other"
	}
	return strconv.FormatUint(code, 10)
}
