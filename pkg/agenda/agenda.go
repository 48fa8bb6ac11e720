// Package agenda runs operations on GPUs, or on something else that has a name: one at a
// time on each, at a given time, and again after a failure, with growing delays.
//
// client-go's workqueue doesn't fit: it can't delay or drop a queued call, so a call requested
// during the delay after a failure would end the delay. Nor does it list the keys that failed, for
// RetryNow.
//
// It imports pkg/gpu and pkg/keylock, and every package may import it.
package agenda

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"time"

	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/keylock"
)

// Worker runs operations on GPUs. Its methods may be called concurrently.
type Worker struct {
	*Agenda[gpu.UUID]

	locks keylock.Locks[gpu.UUID]
	// use is held for reading by every operation. suspended is set while Suspend holds
	// it until Resume.
	use       sync.RWMutex
	suspended bool
}

// NewWorker returns a worker whose delay after consecutive failures on a GPU grows
// from first to last.
func NewWorker(first, last time.Duration) *Worker {
	return &Worker{Agenda: New[gpu.UUID](first, last)}
}

// Lock takes the locks of the GPUs, for one operation on them. uuids are in ascending order.
// It returns an error if ctx ends before the operation can begin.
func (w *Worker) Lock(ctx context.Context, uuids []gpu.UUID) (unlock func(), err error) {
	unlockGPUs, err := w.locks.Lock(ctx, uuids...)
	if err != nil {
		return nil, fmt.Errorf("wait for another operation on GPU %s: %w", uuids[0], err)
	}
	w.use.RLock()
	unlock = func() { w.use.RUnlock(); unlockGPUs() }
	if err := context.Cause(ctx); err != nil {
		unlock()
		return nil, fmt.Errorf("wait until the driver can be used for GPU %s: %w", uuids[0], err)
	}
	return unlock, nil
}

// Suspend returns when no operation runs. Until Resume, operations wait, also beyond the end
// of their contexts, and the driver that they use can be replaced. Calls of Suspend and Resume
// must not overlap.
func (w *Worker) Suspend() {
	if !w.suspended {
		w.use.Lock()
		w.suspended = true
	}
}

// Resume lets operations run after Suspend.
func (w *Worker) Resume() {
	w.suspended = false
	w.use.Unlock()
}

// Each calls f for all of them, concurrently, and joins the errors.
func Each[T any](all []T, f func(T) error) error {
	if len(all) == 1 {
		return f(all[0])
	}
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, one := range all {
		wg.Go(func() { errs[i] = f(one) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Agenda has one entry per key. Its methods may be called concurrently.
type Agenda[K comparable] struct {
	// delays has the delays after failures, by the text of the key.
	delays *flowcontrol.Backoff
	wake   chan struct{}

	mu sync.Mutex
	// due has the time of the next call for a key, and running the keys of calls that
	// have not returned.
	due     map[K]time.Time
	running map[K]bool
	// failures are counted until the key succeeds.
	failures map[K]int
}

// New returns an empty agenda. The delay after consecutive failures of a key grows from first to last.
func New[K comparable](first, last time.Duration) *Agenda[K] {
	return &Agenda[K]{
		delays: flowcontrol.NewBackOff(first, last), wake: make(chan struct{}, 1),
		due: map[K]time.Time{}, running: map[K]bool{}, failures: map[K]int{},
	}
}

// text returns a text for each key that no other key has.
func text[K comparable](key K) string { return fmt.Sprintf("%#v", key) }

// Sweep calls do for each key that is due, until ctx ends, and log for those of its errors
// that are news.
func (a *Agenda[K]) Sweep(ctx context.Context, do func(context.Context, K) error, log func(klog.Logger, K, error)) {
	a.Run(ctx, func(ctx context.Context, key K) {
		if err := do(ctx, key); err != nil && ctx.Err() == nil && a.IsNews(key) {
			log(klog.FromContext(ctx), key, err)
		}
	})
}

// Tried records how an operation for the key has ended, and returns its error. After a
// failure, the key is scheduled again. If there was no driver, nothing is scheduled, and the
// result is nil: with the next one everything is tried.
func (a *Agenda[K]) Tried(key K, err error) error {
	switch {
	case err == nil:
		a.Succeeded(key)
	case errors.Is(err, gpu.ErrNoDriver):
		return nil
	default:
		a.Failed(key)
	}
	return err
}

// Run calls do for each key that is due, concurrently for several keys, and one at a time
// for one key. It returns when ctx has ended and all calls have returned.
func (a *Agenda[K]) Run(ctx context.Context, do func(context.Context, K)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-a.wake:
		}
		due, next := a.takeDue(time.Now())
		for _, key := range due {
			wg.Go(func() {
				defer a.returned(key)
				do(ctx, key)
			})
		}
		timer.Reset(next)
	}
}

// takeDue removes and returns the keys that are due, and returns the time until
// the next one.
func (a *Agenda[K]) takeDue(now time.Time) (due []K, next time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	next = time.Hour
	for key, at := range a.due {
		if a.running[key] {
			continue // returned wakes Run
		}
		if wait := at.Sub(now); wait > 0 {
			next = min(next, wait)
			continue
		}
		due = append(due, key)
		delete(a.due, key)
		a.running[key] = true
	}
	return due, next
}

// returned records that a call for the key has returned.
func (a *Agenda[K]) returned(key K) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.running, key)
	a.wakeRun()
}

// wakeRun makes Run look for keys that are due.
func (a *Agenda[K]) wakeRun() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// At makes Run call do for the key at that time, or earlier, but not during the delay
// after a failure of the key: otherwise an operation whose failure is the reason for the
// next call would be retried without any delay. A delay that RetryNow has ended doesn't count.
func (a *Agenda[K]) At(key K, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if before, ok := a.due[key]; ok && (before.Before(at) || a.delays.IsInBackOffSinceUpdate(text(key), at)) {
		return
	}
	a.due[key] = at
	a.wakeRun()
}

// Failed makes Run call do for the key again after a delay, which grows with
// the number of consecutive failures. Earlier calls that were scheduled are dropped.
func (a *Agenda[K]) Failed(key K) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	a.failures[key]++
	a.delays.Next(text(key), now)
	a.due[key] = now.Add(a.delays.Get(text(key)))
	a.wakeRun()
}

// Succeeded ends the delay after failures of the key, and resets their count.
func (a *Agenda[K]) Succeeded(key K) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.failures, key)
	a.delays.Reset(text(key))
}

// RetryNow makes Run call do for each key that has failed, without waiting for the end
// of its delay. It is called when a common reason for failures may have gone. The delay after
// another failure goes on growing.
func (a *Agenda[K]) RetryNow() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key := range a.failures {
		a.due[key] = time.Now()
	}
	a.wakeRun()
}

// IsNews reports whether to log the key's last failure: whether the number of failures in a row is
// a power of two.
func (a *Agenda[K]) IsNews(key K) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return bits.OnesCount(uint(a.failures[key])) == 1
}
