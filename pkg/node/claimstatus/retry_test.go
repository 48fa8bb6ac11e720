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

	"github.com/tessera-dra/tessera/pkg/pacetest"
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
// tried a few times a minute, and nothing is logged at verbosity 0.
func TestFailedWritesAreRetriedSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &refusing{}
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://server", QPS: -1, Transport: s})
		if err != nil {
			t.Fatal(err)
		}
		w := New(client, "gpu.nvidia.com", "node-a")
		logger, lines := pacetest.Logger(t)
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		ended := make(chan error, 1)
		go func() { ended <- w.Run(ctx) }()
		w.Enqueue(partition())
		most := pacetest.Bound{Attempts: 16} // two requests an attempt: one reads; it logs at a higher verbosity
		pacetest.Minutes(t, func() int { return int(s.requests.Load()) }, lines, func() { time.Sleep(time.Minute) }, most, most, most)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
