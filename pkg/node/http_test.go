package node

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMetricsAddressInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = serve(t.Context(), "--metrics-address", l.Addr().String(), nil, metricsHandler(newRegistry()))
	if err == nil || !strings.Contains(err.Error(), "--metrics-address: ") {
		t.Errorf("got %v, want an error that names --metrics-address", err)
	}
}

// Metrics and probes have addresses of their own, so that metrics can be turned
// off, or kept to the pod, while the kubelet still probes.
func TestMetricsAndProbesAreServedApart(t *testing.T) {
	notReady := func() error { return os.ErrDeadlineExceeded }
	for name, c := range map[string]struct {
		handler http.Handler
		want    map[string]int
	}{
		"metrics": {metricsHandler(newRegistry()), map[string]int{"/healthz": 404, "/readyz": 404, "/metrics": 200}},
		"health":  {healthHandler(func() error { return nil }, notReady), map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 404}},
	} {
		t.Run(name, func(t *testing.T) {
			got := map[string]int{}
			for path := range c.want {
				answer := httptest.NewRecorder()
				c.handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
				got[path] = answer.Code
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("status codes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestServe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	ok := func() error { return nil }
	go func() {
		served <- serve(ctx, "--health-address", address, nil, healthHandler(ok, ok))
	}()
	var resp *http.Response
	for range 6000 { // until it listens
		if resp, err = http.Get("http://" + address + "/readyz"); err == nil {
			break
		}
		<-time.After(10 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("/readyz: %d, want 200", resp.StatusCode)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
