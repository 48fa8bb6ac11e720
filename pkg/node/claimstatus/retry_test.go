package claimstatus

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// refusing is a server, without a network, that fails each time.
type refusing struct{ requests atomic.Int32 }

// RoundTrip implements http.RoundTripper.
func (s *refusing) RoundTrip(*http.Request) (*http.Response, error) {
	s.requests.Add(1)
	w := httptest.NewRecorder()
	fail(w, http.StatusInternalServerError)
	return w.Result(), nil
}

// TestFailedWritesAreRetriedSeldom: while a server is in trouble, the status of a claim is
// tried, and its failure logged, a few times a minute.
func TestFailedWritesAreRetriedSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &refusing{}
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://server", QPS: -1, Transport: s})
		if err != nil {
			t.Fatal(err)
		}
		w := New(client, "gpu.nvidia.com", "node-a")
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		ended := make(chan error, 1)
		go func() { ended <- w.Run(ctx) }()
		w.Enqueue(ref("uid-1"), partition())
		var before, logged int
		const most = 16 // two requests an attempt: one reads
		for range 3 {
			time.Sleep(time.Minute)
			requests := int(s.requests.Load()) - before
			lines := len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data()) - logged
			if requests == 0 || requests > most || lines > most {
				t.Errorf("%d requests and %d log lines in a minute, want at most %d", requests, lines, most)
			}
			before, logged = before+requests, logged+lines
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
