package controltest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics returns what a registry has, a line each: "NAME LABEL=VALUE… NUMBER", zeros left out.
func Metrics(t testing.TB, r prometheus.Gatherer) string {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, f := range families {
		for _, m := range f.GetMetric() {
			n := m.GetGauge().GetValue() + m.GetCounter().GetValue()
			if n == 0 {
				continue
			}
			b.WriteString(strings.TrimPrefix(f.GetName(), "tessera_"))
			for _, l := range m.GetLabel() {
				b.WriteString(" " + l.GetName() + "=" + l.GetValue())
			}
			fmt.Fprintf(&b, " %g\n", n)
		}
	}
	return b.String()
}
