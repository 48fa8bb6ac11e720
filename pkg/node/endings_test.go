package node

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

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
)

// forbidding is a server, without a network, that forbids each request.
type forbidding struct{ requests atomic.Int32 }

// RoundTrip implements http.RoundTripper.
func (s *forbidding) RoundTrip(*http.Request) (*http.Response, error) {
	s.requests.Add(1)
	w := httptest.NewRecorder()
	w.WriteHeader(http.StatusForbidden)
	return w.Result(), nil
}

// TestAnnotationThatStaysIsRetriedSeldom: while the server forbids that the annotation is
// removed, and the inventory changes every second, that is tried and logged a few times a
// minute.
func TestAnnotationThatStaysIsRetriedSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &forbidding{}
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://server", QPS: -1, Transport: s})
		if err != nil {
			t.Fatal(err)
		}
		known := facts.New("node-0")
		if err := known.Found(gpu.Node{Name: "node-0"}); err != nil {
			t.Fatal(err)
		}
		e := newEndings(&plugin{cfg: Config{NodeName: "node-0"}, client: client, facts: known, warnings: newWarnings(client, "node-0")})
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			e.run(ctx)
		}()
		inv := &v1alpha1.GPUInventory{}
		inv.Annotations = map[string]string{v1alpha1.AnnotationEndCondition: "0 NeedsInspection 2026-01-02T15:04:05Z jane it was replaced"}
		var before, logged int
		for _, most := range []int{6, 2, 2} {
			for range 60 {
				e.enqueue(inv)
				time.Sleep(time.Second)
			}
			attempts := int(s.requests.Load()) - before
			lines := len(logger.GetSink().(ktesting.Underlier).GetBuffer().Data()) - logged
			if attempts == 0 || attempts > most || lines > most {
				t.Errorf("%d attempts and %d log lines in a minute, want at most %d", attempts, lines, most)
			}
			before, logged = before+attempts, logged+lines
		}
		cancel()
		<-ended
		e.p.warnings.broadcaster.Shutdown()
	})
}
