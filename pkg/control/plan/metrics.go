package plan

import (
	"maps"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics count what nodes offer. Decisions update them: a scrape reads no nodes.
type metrics struct {
	offered *prometheus.GaugeVec
	// offers are the values of offered.
	offers map[offerKey]int
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	return &metrics{
		offers: make(map[offerKey]int),
		offered: promauto.With(registerer).NewGaugeVec(prometheus.GaugeOpts{
			Name: "tessera_devices_offered",
			Help: "Devices that nodes should offer, by type and by the SharingPolicy of their GPU; allocated ones included.",
		}, []string{"type", "policy"}),
	}
}

// offerKey has the labels by which offered devices are counted.
type offerKey struct{ kind, policy string }

// record replaces an earlier offer of a node by the current one. It deletes series that
// count no devices any more, such as those of a deleted policy.
func (m *metrics) record(before, now Account) {
	if maps.Equal(before.offered, now.offered) {
		return
	}
	for k, n := range before.offered {
		m.offers[k] -= n
	}
	for k, n := range now.offered {
		m.offers[k] += n
	}
	for k, n := range m.offers {
		if n == 0 {
			delete(m.offers, k)
			m.offered.DeleteLabelValues(k.kind, k.policy)
			continue
		}
		m.offered.WithLabelValues(k.kind, k.policy).Set(float64(n))
	}
}
