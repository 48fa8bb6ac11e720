package health

import (
	"maps"
	"sync"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// sameEvery is how often the same is told.
const sameEvery = 5 * time.Minute

// subject of a message: an XID of a GPU, told to a pod; without a pod,
// to the node.
type subject struct {
	pod  string
	gpu  gpu.UUID
	code uint64
}

// limiter keeps storms of XIDs from becoming storms of events.
type limiter struct {
	mu   sync.Mutex
	last map[subject]time.Time
}

// allow reports whether something about the subject may be told now, and notes that
// it is.
func (l *limiter) allow(s subject, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.last, func(_ subject, at time.Time) bool { return now.Sub(at) >= sameEvery })
	if _, told := l.last[s]; told {
		return false
	}
	if l.last == nil {
		l.last = map[subject]time.Time{}
	}
	l.last[s] = now
	return true
}
