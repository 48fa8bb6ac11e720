package facts

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	// burstPause is how long requests are gathered: they come in bursts.
	burstPause = 100 * time.Millisecond
	// calm is how long changes of MIG instances are gathered.
	calm = 2 * time.Second
)

// requests are those for another reading of the hardware.
type requests struct {
	wake chan struct{}
	// hostToo says that there may be other files on the host than before.
	hostToo atomic.Bool
	// calming: the facts will be read in a while, see RereadSoon.
	calming atomic.Bool
	// requested is when the reading was requested that has not begun yet; reading is since
	// when a reading has been requested or in progress; looked is when the last look that
	// confirmed the facts began.
	requested, reading, looked instant
}

// Reread requests that the GPUs and the host's files of the driver are read again. It
// doesn't block.
func (f *Facts) Reread() {
	f.requests.hostToo.Store(true)
	f.RereadGPUs()
}

// RereadGPUs requests that the GPUs are read again. It doesn't block.
func (f *Facts) RereadGPUs() {
	f.requests.requested.setIfNone(time.Now())
	select {
	case f.requests.wake <- struct{}{}:
	default:
	}
}

// RereadSoon requests that the GPUs are read again in a while, once for all requests until
// then: a partition that is created for a claim causes several events, and changes nothing in
// the facts. It doesn't block.
func (f *Facts) RereadSoon() {
	if f.requests.calming.CompareAndSwap(false, true) {
		time.AfterFunc(calm, func() {
			f.requests.calming.Store(false)
			f.RereadGPUs()
		})
	}
}

// AwaitRequest waits for a request, the time, or the end of ctx. It reports whether there was
// a request.
func (f *Facts) AwaitRequest(ctx context.Context, d time.Duration) (requested bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return false
	case <-ctx.Done():
		return false
	case <-f.requests.wake:
		select {
		case <-time.After(burstPause):
		case <-ctx.Done():
		}
		return true
	}
}

// BeginReading says that a reading begins which answers all requests until now, or a search
// for the driver. It ends with Found or Missing. hostToo is whether one of them was for the
// host's files too.
func (f *Facts) BeginReading() (hostToo bool) {
	at, ok := f.requests.requested.take()
	if !ok {
		at = time.Now()
	}
	f.requests.reading.setIfNone(at)
	return f.requests.hostToo.Swap(false)
}
