package endpoints

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// untilEnd is the work of a program that ends with its context.
func untilEnd(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func TestMetricsAddressInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = Serve(t.Context(), untilEnd, Metrics(l.Addr().String(), NewRegistry()))
	if err == nil || !strings.Contains(err.Error(), "--metrics-address: ") {
		t.Errorf("got %v, want an error that names --metrics-address", err)
	}
}

func ok(context.Context) error { return nil }

// Metrics and probes have addresses of their own, so that metrics can be turned
// off, or kept to the pod, while the kubelet still probes.
func TestMetricsAndProbesAreServedApart(t *testing.T) {
	notReady := func(context.Context) error { return os.ErrDeadlineExceeded }
	for name, c := range map[string]struct {
		server Server
		want   map[string]int
	}{
		"metrics": {Metrics("", NewRegistry()), map[string]int{"/healthz": 404, "/readyz": 404, "/metrics": 200}},
		"health":  {Health("", ok, notReady), map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 404}},
	} {
		t.Run(name, func(t *testing.T) {
			got := map[string]int{}
			for path := range c.want {
				answer := httptest.NewRecorder()
				c.server.Handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
				got[path] = answer.Code
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("status codes (-want +got):\n%s", diff)
			}
		})
	}
}

// TestServe checks that a program is asked while it works, that it ends without an error, and
// that metrics without an address are served nowhere.
func TestServe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() { served <- Serve(ctx, untilEnd, Health(address, ok, ok), Metrics("0", NewRegistry())) }()
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

// TestServeEndsWithTheWork: the servers don't outlive the program's work, whose error is
// returned.
func TestServeEndsWithTheWork(t *testing.T) {
	failed := func(context.Context) error { return os.ErrClosed }
	if err := Serve(t.Context(), failed, Health("127.0.0.1:0", ok, ok)); !errors.Is(err, os.ErrClosed) {
		t.Errorf("got %v, want the error of the work", err)
	}
}
