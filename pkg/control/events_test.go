package control

import (
	"strings"
	"testing"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
)

// TestLongEvents checks that an event's note has at most the 1024 bytes that the API
// server accepts, also where characters have several bytes.
func TestLongEvents(t *testing.T) {
	for name, c := range map[string]struct {
		note string
		cut  bool
	}{
		"as long as possible":     {strings.Repeat("a", 1024), false},
		"longer":                  {strings.Repeat("a", 1025), true},
		"two bytes a character":   {strings.Repeat("é", 600), true},
		"three bytes a character": {"a" + strings.Repeat("…", 400), true},
	} {
		t.Run(name, func(t *testing.T) {
			recorder := events.NewFakeRecorder(1)
			shortEvents{recorder}.Eventf(&corev1.Node{}, nil, "Warning", "Reason", "Act", "%s", c.note)
			_, note, _ := strings.Cut(<-recorder.Events, "Reason ")
			if len(note) > 1024 || len(note) < 1020 || !utf8.ValidString(note) || strings.HasSuffix(note, "…") != c.cut {
				t.Errorf("%d bytes: %q", len(note), note)
			}
		})
	}
}
