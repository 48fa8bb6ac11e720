package test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	rulesFile  = chart + "/files/monitoring/rules.yaml"
	dashboards = chart + "/files/monitoring/dashboards/*.json"
)

// The operator and Grafana get the texts of the chart's files, with the labels by which
// they look for it.
func TestMonitoringObjects(t *testing.T) {
	out, all, err := template(t, "--set=monitoring.rules.enabled=true,monitoring.rules.labels.release=prometheus",
		"--set=monitoring.dashboards.enabled=true,monitoring.dashboards.annotations.grafana_folder=GPUs")
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, all)
	}
	want := map[string]string{}
	for _, file := range dashboardFiles(t) {
		want["tessera-"+filepath.Base(file)] = read(t, file)
	}
	for doc := range strings.SplitSeq(out, "\n---\n") {
		switch {
		case strings.Contains(doc, "\nkind: PrometheusRule\n"):
			rule := parsed(t, doc)
			if diff := cmp.Diff(parsed(t, read(t, rulesFile)).Object, rule.Object["spec"]); diff != "" {
				t.Errorf("spec of the PrometheusRule (-file +spec):\n%s", diff)
			}
			if rule.GetLabels()["release"] != "prometheus" {
				t.Errorf("labels of the PrometheusRule: %v", rule.GetLabels())
			}
		case strings.Contains(doc, "grafana_dashboard"):
			var config corev1.ConfigMap
			if err := yaml.UnmarshalStrict([]byte(doc), &config); err != nil {
				t.Fatal(err)
			}
			if config.Labels["grafana_dashboard"] != "1" || config.Annotations["grafana_folder"] != "GPUs" {
				t.Errorf("ConfigMap %s: labels %v, annotations %v", config.Name, config.Labels, config.Annotations)
			}
			for name, text := range config.Data {
				if strings.TrimSpace(want[name]) != strings.TrimSpace(text) {
					t.Errorf("ConfigMap %s: %s is not the file's text", config.Name, name)
				}
				delete(want, name)
			}
		}
	}
	if len(want) > 0 || !strings.Contains(out, "\nkind: PrometheusRule\n") {
		t.Errorf("not rendered: the dashboards %v, or the rules", want)
	}
}

// Queries name metrics of docs/user/monitor.md, and such as rules record. (The long check
// prometheus runs the queries.)
func TestMonitoringMetrics(t *testing.T) {
	metric := regexp.MustCompile(`\b(?:[a-z]+:)?tessera_\w+(?::\w+)?`)
	known := map[string]bool{}
	for _, name := range metric.FindAllString(read(t, "../../../docs/user/monitor.md"), -1) {
		known[name] = true
	}
	rules := read(t, rulesFile)
	for _, m := range regexp.MustCompile(`- record: (\S+)`).FindAllStringSubmatch(rules, -1) {
		known[m[1]] = true
	}
	texts := map[string]string{rulesFile: rules}
	for _, file := range dashboardFiles(t) {
		texts[file] = read(t, file)
		if !json.Valid([]byte(texts[file])) {
			t.Errorf("%s isn't JSON", file)
		}
	}
	for file, text := range texts {
		for _, name := range metric.FindAllString(text, -1) {
			histogram := regexp.MustCompile(`_(bucket|count|sum)$`).ReplaceAllString(name, "")
			if !known[name] && !known[histogram] {
				t.Errorf("%s: no metric or rule is named %s", filepath.Base(file), name)
			}
		}
	}
}

// Conditions that block a GPU are alerts of another kind than those that don't.
func TestMonitoringConditions(t *testing.T) {
	list := regexp.MustCompile(`condition!~"Healthy\|([A-Za-z|]+)"`).FindStringSubmatch(read(t, rulesFile))
	if list == nil {
		t.Fatal("the rules have no list of conditions")
	}
	harmless := regexp.MustCompile("^(" + list[1] + ")$")
	source := read(t, "../../../pkg/gpu/gpu.go") + read(t, "../../../pkg/gpu/health.go")
	types := regexp.MustCompile(`ConditionType = "(\w+)"`).FindAllStringSubmatch(source, -1)
	if len(types) < 10 {
		t.Fatalf("found only the conditions %v", types)
	}
	for _, m := range types {
		is := gpu.Condition{Type: gpu.ConditionType(m[1])}
		if blocked := !harmless.MatchString(m[1]); blocked != is.BlocksAllDevices() {
			t.Errorf("%s blocks the GPU: %t, and in the rules: %t", m[1], is.BlocksAllDevices(), blocked)
		}
	}
}

// Each alert leads to instructions.
func TestAlertsAreDocumented(t *testing.T) {
	page := read(t, "../../../docs/user/monitor.md")
	alerts := regexp.MustCompile(`(?s)- alert: (\w+)\n.*?runbook_url: (\S+)`).FindAllStringSubmatch(read(t, rulesFile), -1)
	if len(alerts) < 5 {
		t.Fatalf("found only the alerts %v", alerts)
	}
	for _, m := range alerts {
		if want := "https://github.com/tessera-dra/tessera/blob/main/docs/user/monitor.md#" + strings.ToLower(m[1]); m[2] != want {
			t.Errorf("%s: runbook_url %s, want %s", m[1], m[2], want)
		}
		if !strings.Contains(page, "\n### "+m[1]+"\n") {
			t.Errorf("docs/user/monitor.md has no section about %s", m[1])
		}
	}
}

func dashboardFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(dashboards)
	if err != nil || len(files) == 0 {
		t.Fatalf("the chart has no dashboards: %v", err)
	}
	return files
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func parsed(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	object := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &object.Object); err != nil {
		t.Fatal(err)
	}
	return object
}
