package control

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"
)

// maxNote is the most bytes that the API server accepts as an event's note: it refuses
// an event with more.
const maxNote = 1024

// shortEvents is a recorder that cuts notes to the length that the API server accepts.
type shortEvents struct{ events.EventRecorder }

// Eventf records an event whose note is cut if it is too long.
func (r shortEvents) Eventf(regarding, related runtime.Object, kind, reason, action, note string, args ...any) {
	r.EventRecorder.Eventf(regarding, related, kind, reason, action, "%s", cutBytes(fmt.Sprintf(note, args...), maxNote))
}

// cutBytes shortens a text to at most that many bytes, without splitting a character.
func cutBytes(text string, most int) string {
	const end = "…"
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-len(end)], "") + end
}
