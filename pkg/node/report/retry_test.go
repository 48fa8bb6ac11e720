package report_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/report"
	"github.com/tessera-dra/tessera/pkg/pacetest"
)

// readOnly is the server without a network, with all writes refused.
type readOnly struct {
	*server

	writes atomic.Int32
}

// RoundTrip implements http.RoundTripper.
func (s *readOnly) RoundTrip(r *http.Request) (*http.Response, error) {
	q := r.URL.Query()
	w := httptest.NewRecorder()
	switch {
	case q.Get("watch") != "" && q.Get("sendInitialEvents") == "":
		w.Header().Set("Content-Type", "application/json")
		answer := w.Result()
		answer.Body = nothing{r.Context()}
		return answer, nil
	case r.Method != http.MethodGet:
		s.writes.Add(1)
		w.WriteHeader(http.StatusInternalServerError)
	default:
		s.serve(w, r)
	}
	return w.Result(), nil
}

// nothing is a body without contents that ends with the request.
type nothing struct{ ctx context.Context }

func (n nothing) Read([]byte) (int, error) {
	<-n.ctx.Done()
	return 0, io.EOF
}

func (nothing) Close() error { return nil }

// TestFailedWritesAreRetriedSeldom: while a server refuses writes, and the facts change
// every second, the report is written and its failure logged a few times a minute.
func TestFailedWritesAreRetriedSeldom(t *testing.T) {
	s := &readOnly{server: newServer(t)}
	synctest.Test(t, func(t *testing.T) {
		known := facts.New("node-0")
		r, err := report.New(report.Config{
			BootID: "boot", NodeName: "node-0", PluginVersion: "v1", Facts: known,
			REST: &rest.Config{Host: "http://server", QPS: -1, Transport: s},
		})
		if err != nil {
			t.Fatal(err)
		}
		logger, lines := pacetest.Logger(t)
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		pacetest.Minutes(t, func() int { return int(s.writes.Load()) }, lines, func() {
			for second := range 60 {
				changed := h100
				changed.MemoryBytes = int64(80+second%2) << 30
				known.Found(node(changed))
				time.Sleep(time.Second)
			}
		}, pacetest.Bound{Attempts: 9, Lines: 9}, pacetest.Bound{Attempts: 3, Lines: 3}, pacetest.Bound{Attempts: 3, Lines: 3})
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
