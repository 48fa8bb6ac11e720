//go:build prometheus

package monitoring

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// podMonitor has those fields of the Prometheus Operator's kind that the chart uses. A
// field that isn't here makes the test fail: it would have to be translated.
type podMonitor struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name, Namespace string
		Labels          map[string]string
	} `json:"metadata"`
	Spec struct {
		Selector struct {
			MatchLabels      map[string]string `json:"matchLabels"`
			MatchExpressions []struct {
				Key, Operator string
				Values        []string
			} `json:"matchExpressions"`
		} `json:"selector"`
		PodMetricsEndpoints []struct {
			Port        string
			HonorLabels bool `json:"honorLabels"`
			Relabelings []struct {
				SourceLabels []string `json:"sourceLabels"`
				TargetLabel  string   `json:"targetLabel"`
			}
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}

// relabel is an entry of Prometheus' relabel_configs.
type relabel struct {
	SourceLabels []string `json:"source_labels,omitempty"`
	Regex        string   `json:"regex,omitempty"`
	TargetLabel  string   `json:"target_label,omitempty"`
	Replacement  string   `json:"replacement,omitempty"`
	Action       string   `json:"action,omitempty"`
}

// scrapeConfig translates a PodMonitor as the Operator does, but for the way to the
// pods, which here is the API server's proxy: this host has no route to them.
func scrapeConfig(t *testing.T, rendered, server, credentials string) map[string]any {
	t.Helper()
	var m podMonitor
	if err := yaml.UnmarshalStrict([]byte(rendered), &m); err != nil {
		t.Fatal(err)
	}
	if len(m.Spec.PodMetricsEndpoints) != 1 {
		t.Fatalf("%d endpoints, want one", len(m.Spec.PodMetricsEndpoints))
	}
	endpoint := m.Spec.PodMetricsEndpoints[0]
	var r []relabel
	keep := func(label, regex string) {
		r = append(r, relabel{SourceLabels: []string{label}, Regex: regex, Action: "keep"})
	}
	for _, name := range slices.Sorted(maps.Keys(m.Spec.Selector.MatchLabels)) {
		keep(metaLabel(name), m.Spec.Selector.MatchLabels[name])
	}
	for _, e := range m.Spec.Selector.MatchExpressions {
		if e.Operator != "In" {
			t.Fatalf("operator %s", e.Operator)
		}
		keep(metaLabel(e.Key), strings.Join(e.Values, "|"))
	}
	keep("__meta_kubernetes_pod_container_port_name", endpoint.Port)
	for target, source := range map[string]string{
		"namespace": "__meta_kubernetes_namespace", "container": "__meta_kubernetes_pod_container_name",
		"pod": "__meta_kubernetes_pod_name", "instance": "__address__",
	} {
		r = append(r, relabel{SourceLabels: []string{source}, TargetLabel: target})
	}
	r = append(r, relabel{TargetLabel: "job", Replacement: m.Metadata.Namespace + "/" + m.Metadata.Name}, relabel{TargetLabel: "endpoint", Replacement: endpoint.Port})
	for _, own := range endpoint.Relabelings {
		r = append(r, relabel{SourceLabels: own.SourceLabels, TargetLabel: own.TargetLabel})
	}
	r = append(r, relabel{
		SourceLabels: []string{"__meta_kubernetes_namespace", "__meta_kubernetes_pod_name", "__meta_kubernetes_pod_container_port_number"},
		Regex:        "(.+);(.+);(.+)", TargetLabel: "__metrics_path__", Replacement: "/api/v1/namespaces/$1/pods/$2:$3/proxy/metrics",
	}, relabel{TargetLabel: "__address__", Replacement: strings.TrimPrefix(server, "https://")})
	tls := map[string]string{"ca_file": credentials + "/ca.crt", "cert_file": credentials + "/client.crt", "key_file": credentials + "/client.key"}
	return map[string]any{
		"job_name": "podMonitor", "scheme": "https", "tls_config": tls, "honor_labels": endpoint.HonorLabels, "relabel_configs": r,
		"kubernetes_sd_configs": []any{map[string]any{"role": "pod", "api_server": server, "tls_config": tls}},
	}
}

// metaLabel is the label of Prometheus' discovery for a label of a pod.
func metaLabel(name string) string {
	return "__meta_kubernetes_pod_label_" + strings.NewReplacer(".", "_", "/", "_", "-", "_").Replace(name)
}

// configuration is Prometheus' file.
func configuration(t *testing.T, rules string, scrapes ...map[string]any) string {
	t.Helper()
	text, err := yaml.Marshal(map[string]any{
		"global":     map[string]string{"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"},
		"rule_files": []string{rules}, "scrape_configs": scrapes,
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
