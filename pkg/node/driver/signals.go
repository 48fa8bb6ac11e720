package driver

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	// burstPause is how long signals are gathered: they come in bursts.
	burstPause = 100 * time.Millisecond
	// calm is how long changes of MIG instances are gathered.
	calm = 2 * time.Second
)

// Signals request that the hardware is read again. Its methods may be called
// concurrently and don't block.
type Signals struct {
	wake chan struct{}
	// hostChanged says that there may be other files on the host than before,
	// so that the facts of the GPUs aren't all that is to be looked at.
	hostChanged atomic.Bool
	// calming: the facts will be read in a while, see soon.
	calming atomic.Bool
	// requested is when the reading was requested that has not begun yet.
	requested instant
}

// NewSignals returns Signals for one Follower.
func NewSignals() *Signals { return &Signals{wake: make(chan struct{}, 1)} }

// Wake requests that the facts and the host's files of the driver are read again.
func (s *Signals) Wake() {
	s.hostChanged.Store(true)
	s.WakeForGPUs()
}

// WakeForGPUs requests that the facts of the GPUs are read again.
func (s *Signals) WakeForGPUs() {
	s.requested.setIfNone(time.Now())
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// soon requests that the facts of the GPUs are read again in a while, once for all
// requests until then: a partition that is created for a claim causes several
// events, and changes nothing in the facts.
func (s *Signals) soon() {
	if s.calming.CompareAndSwap(false, true) {
		time.AfterFunc(calm, func() {
			s.calming.Store(false)
			s.WakeForGPUs()
		})
	}
}

// await waits for a signal, the time, or the end of ctx. It reports whether there was
// a signal.
func (s *Signals) await(ctx context.Context, d time.Duration) (woken bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return false
	case <-ctx.Done():
		return false
	case <-s.wake:
		select {
		case <-time.After(burstPause):
		case <-ctx.Done():
		}
		return true
	}
}

// heartbeat is the time at which a loop last made progress.
type heartbeat struct{ last instant }

func (h *heartbeat) beat() { h.last.set(time.Now()) }

// age is the time since the last beat; none before the first.
func (h *heartbeat) age(now time.Time) time.Duration {
	last, ok := h.last.get()
	if !ok {
		return 0
	}
	return now.Sub(last)
}
