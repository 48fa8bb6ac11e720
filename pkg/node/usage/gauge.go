package usage

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// family is a metric with the names of its labels.
type family struct {
	*prometheus.Desc
	names []string
	// order has the indexes of the names, sorted: Prometheus wants labels in that order.
	order []int
}

func newFamily(name, help string, labels ...string) *family {
	f := &family{Desc: prometheus.NewDesc(name, help, labels, nil), names: labels}
	for i := range labels {
		f.order = append(f.order, i)
	}
	slices.SortFunc(f.order, func(a, b int) int { return strings.Compare(labels[a], labels[b]) })
	return f
}

// gauge is one series. Those of the library allocate each label's name, value and pair by
// itself, which is most of the garbage of a scrape of hundreds of shares.
type gauge struct {
	of     *family
	value  float64
	labels []string
}

// Desc implements prometheus.Metric.
func (g *gauge) Desc() *prometheus.Desc { return g.of.Desc }

// Write implements prometheus.Metric.
func (g *gauge) Write(out *dto.Metric) error {
	pairs := make([]dto.LabelPair, len(g.labels))
	out.Label = make([]*dto.LabelPair, len(g.labels))
	for n, i := range g.of.order {
		pairs[n].Name, pairs[n].Value = &g.of.names[i], &g.labels[i]
		out.Label[n] = &pairs[n]
	}
	out.Gauge = &dto.Gauge{Value: &g.value}
	return nil
}
