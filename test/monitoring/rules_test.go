//go:build prometheus

package monitoring

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/sim/cluster"
)

const (
	chart     = "../../deployments/helm/tessera"
	rulesFile = chart + "/files/monitoring/rules.yaml"
	page      = "../../docs/user/monitor.md"
)

// TestRules runs the unit tests in testdata: of the rules, and of the page's queries.
func TestRules(t *testing.T) {
	promtool, err := cluster.Tool(t.Context(), "promtool", os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	tests, err := filepath.Glob("testdata/*.rules.yaml")
	if err != nil || len(tests) == 0 {
		t.Fatalf("no tests of rules: %v", err)
	}
	var texts string
	for _, file := range tests {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		texts += string(text)
	}
	for name := range alerts(t) {
		if !strings.Contains(texts, name) {
			t.Errorf("the alert %s has no test", name)
		}
	}
	for _, query := range pageQueries(t) {
		if !strings.Contains(oneLine(texts), query) {
			t.Errorf("the query %s of %s has no test", query, page)
		}
	}
	for _, args := range [][]string{
		{"check", "rules", "--lint=all", "--lint-fatal", rulesFile},
		append([]string{"test", "rules"}, tests...),
	} {
		if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
}
