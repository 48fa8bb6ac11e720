package driver

import (
	"sync/atomic"
	"time"
)

// heartbeat is the time at which a loop last made progress.
type heartbeat struct{ last atomic.Pointer[time.Time] }

func (h *heartbeat) beat() {
	now := time.Now()
	h.last.Store(&now)
}

// age is the time since the last beat; none before the first.
func (h *heartbeat) age(now time.Time) time.Duration {
	last := h.last.Load()
	if last == nil {
		return 0
	}
	return now.Sub(*last)
}
