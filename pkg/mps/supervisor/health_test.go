package supervisor

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

func TestMetricsAreServed(t *testing.T) {
	s, err := New(Config{RunDir: t.TempDir(), HostRoot: "/"})
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{"/metrics": http.StatusOK, "/healthz": http.StatusNotFound} {
		answer := httptest.NewRecorder()
		s.servers()[0].Handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		if answer.Code != want {
			t.Errorf("%s: %d, want %d", path, answer.Code, want)
		}
	}
}

// Health is that of who answers the plugin.
func TestHealth(t *testing.T) {
	s, err := New(Config{RunDir: t.TempDir(), HostRoot: "/"})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s.servers()[1].Handler)
	defer server.Close()
	check := func(path string, want int) {
		t.Helper()
		answer, err := http.Get(server.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("%s: %s, want %d", path, answer.Status, want)
		}
	}
	check("/readyz", http.StatusServiceUnavailable)
	check("/healthz", http.StatusOK) // it waits for another one
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	for !s.serving.Load() {
		time.Sleep(time.Millisecond)
	}
	check("/readyz", http.StatusOK)
	check("/healthz", http.StatusOK)
	check("/metrics", http.StatusNotFound) // it has an address of its own
	s.mu.Lock()                            // all calls block from now on
	check("/healthz", http.StatusServiceUnavailable)
	s.mu.Unlock()
	check("/healthz", http.StatusOK)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
