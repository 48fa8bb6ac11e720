// Package metrics reads metrics that programs serve, for tests and benchmarks.
package metrics

import (
	"context"
	"fmt"
	"io"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/client-go/rest"
)

// Families are metrics by their names.
type Families map[string]*dto.MetricFamily

// Server returns the metrics at a path of the API server, such as its own: /metrics.
func Server(ctx context.Context, server rest.Interface, path ...string) (Families, error) {
	stream, err := server.Get().AbsPath(path...).Stream(ctx)
	if err != nil {
		return nil, fmt.Errorf("read metrics at %v of the API server: %w", path, err)
	}
	defer stream.Close()
	return Parse(stream)
}

// Parse reads the text format of Prometheus.
func Parse(text io.Reader) (Families, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(text)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	return families, nil
}

// Label returns a metric's label; "" if it has none of that name.
func Label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}
