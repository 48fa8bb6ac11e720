package healthmonitor

import (
	"maps"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// repeatAfter is the least time between two events about the same subject.
const repeatAfter = 5 * time.Minute

// subject of an event: an XID of a GPU, and the pod that it hit; without a pod, the
// node.
type subject struct {
	pod  string
	gpu  gpu.UUID
	code uint64
}

// limiter keeps storms of XIDs from becoming storms of events. It is for one goroutine.
type limiter struct {
	last map[subject]time.Time
}

// allow reports whether an event about the subject may be written now, and records
// that it is.
func (l *limiter) allow(s subject, now time.Time) bool {
	maps.DeleteFunc(l.last, func(_ subject, at time.Time) bool { return now.Sub(at) >= repeatAfter })
	if _, recent := l.last[s]; recent {
		return false
	}
	if l.last == nil {
		l.last = map[subject]time.Time{}
	}
	l.last[s] = now
	return true
}
