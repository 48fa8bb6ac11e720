package healthmonitor

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

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/pacetest"
)

// noEvents drops events.
type noEvents struct{}

func (noEvents) WarnPod(string, holding.Pod, string, string) {}
func (noEvents) OnNode(string, string, string)               {}

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
	forbidden(t, func(t *testing.T, m *Monitor, s *forbidding, lines func() int, inv *v1alpha1.GPUInventory) {
		pacetest.Minutes(t, func() int { return int(s.requests.Load()) }, lines, func() {
			for range 60 {
				m.SawInventory(inv)
				time.Sleep(time.Second)
			}
		}, pacetest.Bound{Attempts: 6, Lines: 6}, pacetest.Bound{Attempts: 2, Lines: 2}, pacetest.Bound{Attempts: 2, Lines: 2})
	})
}

// TestAnnotationThatStaysIsRetried: the removal is tried again although nothing changes the
// inventory.
func TestAnnotationThatStaysIsRetried(t *testing.T) {
	forbidden(t, func(t *testing.T, m *Monitor, s *forbidding, _ func() int, inv *v1alpha1.GPUInventory) {
		m.SawInventory(inv)
		time.Sleep(time.Minute)
		if n := s.requests.Load(); n < 2 {
			t.Errorf("%d attempts in a minute", n)
		}
	})
}

// forbidden runs a test with a Monitor whose server forbids that the annotation of inv is removed.
func forbidden(t *testing.T, test func(t *testing.T, m *Monitor, s *forbidding, lines func() int, inv *v1alpha1.GPUInventory)) {
	synctest.Test(t, func(t *testing.T) {
		s := &forbidding{}
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://server", QPS: -1, Transport: s})
		if err != nil {
			t.Fatal(err)
		}
		known := facts.New("node-0")
		known.Found(gpu.Node{Name: "node-0"})
		j, err := journal.Open(t.TempDir(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		m := New(Config{NodeName: "node-0", Client: client, Journal: j, Facts: known, Sharing: sharing.New(sharing.Config{Journal: j}), Events: noEvents{}})
		logger, lines := pacetest.Logger(t)
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			m.doTasks(ctx)
		}()
		inv := &v1alpha1.GPUInventory{}
		inv.Annotations = map[string]string{v1alpha1.AnnotationEndCondition: "0 NeedsInspection 2026-01-02T15:04:05Z jane it was replaced"}
		test(t, m, s, lines, inv)
		cancel()
		<-ended
	})
}
