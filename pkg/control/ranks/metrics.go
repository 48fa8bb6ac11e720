package ranks

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/tessera-dra/tessera/pkg/rank"
)

type metrics struct {
	free, reserve *counts
	writes        prometheus.Counter
}

// counts is a gauge that counts nodes. It keeps what it shows, so that a scrape never sees a part.
type counts struct {
	gauge  *prometheus.GaugeVec
	labels int // how many the gauge has
	shown  map[labels]int
}

// labels are the values of a gauge's labels.
type labels [3]string

func (c *counts) show(now map[labels]int) {
	for l, n := range now {
		c.gauge.WithLabelValues(l[:c.labels]...).Set(float64(n))
	}
	for l := range c.shown {
		if _, still := now[l]; !still {
			c.gauge.DeleteLabelValues(l[:c.labels]...)
		}
	}
	c.shown = now
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	f := promauto.With(registerer)
	return &metrics{
		free: &counts{gauge: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tessera_nodes_wholly_free",
			Help: "Nodes that offer whole GPUs and of which no claim has anything, by how many GPUs they have. Nodes that take no pods now don't count. Only with packing.ranks.",
		}, []string{"pool", "gpus"}), labels: 2},
		reserve: &counts{gauge: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tessera_nodes_reserved",
			Help: "Nodes of the reserve for pods that need all GPUs of a node, by whether other pods are kept off (hard) or come last (soft), and whether a claim has one (used). Only with packing.ranks.",
		}, []string{"pool", "kind", "used"}), labels: 3},
		writes: f.NewCounter(prometheus.CounterOpts{
			Name: "tessera_rank_writes_total",
			Help: "Nodes whose rank was written.",
		}),
	}
}

// show sets the gauges to what has been decided.
func (m *metrics) show(nodes []rank.Node, ranks map[string]rank.Rank) {
	free, reserve := make(map[labels]int), make(map[labels]int)
	for _, n := range nodes {
		if n.Away || n.GPUs == 0 {
			continue
		}
		unused := n.Free == n.GPUs
		size := labels{n.Pool, strconv.Itoa(n.GPUs)}
		free[size] += 0 // 0 is shown, too
		if unused {
			free[size]++
		}
		if r := ranks[n.Name]; r.Reserve() {
			reserve[labels{n.Pool, kind(r), strconv.FormatBool(!unused)}]++
		}
	}
	m.free.show(free)
	m.reserve.show(reserve)
}

func kind(r rank.Rank) string {
	if r.Hard {
		return "hard"
	}
	return "soft"
}
