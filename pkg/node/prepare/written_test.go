package prepare_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tessera-dra/tessera/pkg/node/events"
)

// written are the events that the plugin writes to the API server.
type written struct{ events chan *corev1.Event }

func newWritten() *written { return &written{events: make(chan *corev1.Event, 100)} }

// Create, Update and Patch implement record.EventSink.
func (w *written) Create(e *corev1.Event) (*corev1.Event, error) {
	w.events <- e
	return e, nil
}

func (w *written) Update(e *corev1.Event) (*corev1.Event, error) { return w.Create(e) }

func (w *written) Patch(e *corev1.Event, _ []byte) (*corev1.Event, error) { return w.Create(e) }

// await returns when events are sent: those that came before are lost.
func (w *written) await(e *events.Events) {
	for {
		e.OnNode(corev1.EventTypeNormal, first, "")
		select {
		case <-w.events:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// The reasons of events of the test's own.
const first, last = "First", "Last"

// told returns the events of a type that were written since it was called last.
func (f *fixture) told(t *testing.T, eventType string) []string {
	t.Helper()
	f.events.OnNode(eventType, last, "")
	var all []string
	for {
		e := <-f.written.events
		switch {
		case e.Reason == last:
			return all
		case e.Type == eventType && e.Reason != first:
			all = append(all, fmt.Sprintf("%s/%s %s: %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, e.Message))
		}
	}
}
