package top

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// metrics are those of one plugin, by name.
type metrics map[string]*dto.MetricFamily

// having are labels that a series has.
type having map[string]string

// match reports whether a series has the labels. A missing one is an empty one.
func (h having) match(s *dto.Metric) bool {
	for name, want := range h {
		if labelOf(s, name) != want {
			return false
		}
	}
	return true
}

func labelOf(s *dto.Metric, name string) string {
	for _, p := range s.GetLabel() {
		if p.GetName() == name {
			return p.GetValue()
		}
	}
	return ""
}

// sum adds the series that have the labels; nil: there are none. Series of shares are
// one for each container, and no process is counted in two.
func (m metrics) sum(name string, of having) *float64 {
	var out *float64
	for _, s := range m[name].GetMetric() {
		if of.match(s) {
			if out == nil {
				out = new(float64)
			}
			*out += s.GetGauge().GetValue()
		}
	}
	return out
}

// measured returns the load by the metrics with the prefix.
func (m metrics) measured(prefix string, of having) load {
	out := load{Utilization: m.sum(prefix+"_utilization_ratio", of)}
	if used := m.sum(prefix+"_memory_used_bytes", of); used != nil {
		n := int64(*used)
		out.UsedBytes = &n
	}
	return out
}

// label is the value of a label of the first series that has the others.
func (m metrics) label(name string, of having, label string) string {
	for _, s := range m[name].GetMetric() {
		if of.match(s) {
			return labelOf(s, label)
		}
	}
	return ""
}

// readMetrics reads the text format.
func readMetrics(raw []byte) (metrics, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(raw))
	return families, err
}

const (
	// answerWithin is how long a plugin may take.
	answerWithin = 10 * time.Second
	// authenticated is the plugins' flag.
	authenticated = "--metrics-authentication"
	// metricsPort is the name of the plugins' port.
	metricsPort = "metrics"
)

// errAuthenticated is of a plugin that gives metrics to bearers of a token only.
var errAuthenticated = errors.New("metrics take a token")

// measure reads the metrics of the plugins of the nodes. Those that can't be read are
// noted.
func measure(ctx context.Context, r *cluster.Reader, c view.Cluster) (map[string]metrics, error) {
	pods, err := r.TesseraPods(ctx)
	if err != nil || r.AnyUnread(cluster.PodsName) {
		return nil, err
	}
	byNode := make(map[string]*corev1.Pod)
	for _, p := range cluster.Plugins(pods) {
		byNode[p.Spec.NodeName] = &p
	}
	found := make([]metrics, len(c.Nodes))
	errs := cluster.AtATime(len(c.Nodes), func(i int) (err error) {
		found[i], err = metricsOf(ctx, r, byNode[c.Nodes[i].Name])
		return err
	})
	out := make(map[string]metrics, len(c.Nodes))
	for i, n := range c.Nodes {
		out[n.Name] = found[i]
		switch err := errs[i]; {
		case errors.Is(err, errAuthenticated):
			r.Note("%s", "The plugins give metrics only to bearers of a token (metrics.authentication of the chart). The API server's proxy doesn't pass on yours, and it isn't sent to pods in another way, "+
				"because a pod could misuse it. Ask the Prometheus that collects them ("+cluster.Documents+"monitor.md), or turn metrics.authentication off and restrict who can reach the pods.")
		case apierrors.IsForbidden(err):
			r.Note("You may not get pods/proxy in namespace %s: nothing can be measured. Ask for the verb get on it.", byNode[n.Name].Namespace)
		case err != nil:
			r.Note("Nothing is known of the load of %s: %v.", n.Name, err)
		}
	}
	return out, nil
}

// metricsOf reads the metrics of a plugin.
func metricsOf(ctx context.Context, r *cluster.Reader, p *corev1.Pod) (metrics, error) {
	if p == nil {
		return nil, fmt.Errorf("no plugin runs there")
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	for _, c := range p.Spec.Containers {
		i := slices.IndexFunc(c.Ports, func(port corev1.ContainerPort) bool { return port.Name == metricsPort })
		if i < 0 {
			continue
		}
		if slices.ContainsFunc(c.Args, func(a string) bool { return a == authenticated || a == authenticated+"=true" }) {
			return nil, errAuthenticated
		}
		raw, err := r.Kube.CoreV1().Pods(p.Namespace).ProxyGet("http", p.Name, strconv.Itoa(int(c.Ports[i].ContainerPort)), "metrics", nil).DoRaw(ctx)
		if apierrors.IsForbidden(err) {
			return nil, err
		}
		if err != nil {
			return nil, fmt.Errorf("read the metrics of pod %s/%s: %w", p.Namespace, p.Name, err)
		}
		m, err := readMetrics(raw)
		if err != nil {
			return nil, fmt.Errorf("read the metrics of pod %s/%s: %w", p.Namespace, p.Name, err)
		}
		return m, nil
	}
	return nil, fmt.Errorf("its plugin serves no metrics (metrics.enabled of the chart)")
}
