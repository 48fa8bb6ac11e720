// Package agenda runs operations on GPUs: one at a time on each GPU, at a given time,
// and again after a failure, with growing delays.
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

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/keylock"
)

// Worker runs operations on GPUs. Its methods may be called concurrently.
type Worker struct {
	*Agenda[gpu.UUID]

	locks keylock.Locks[gpu.UUID]
	// use is held for reading by every operation. suspended is set while Suspend holds
	// it until Exchange.
	use       sync.RWMutex
	suspended bool
}

// NewWorker returns a worker whose delay after consecutive failures on a GPU grows
// from first to last.
func NewWorker(first, last time.Duration) *Worker { return &Worker{Agenda: New[gpu.UUID](first, last)} }

// Do calls f with the locks of the GPUs held. uuids are in ascending order. It returns
// an error if ctx ends before it can call f.
func (w *Worker) Do(ctx context.Context, uuids []gpu.UUID, f func() error) error {
	unlock, err := w.locks.Lock(ctx, uuids...)
	if err != nil {
		return fmt.Errorf("wait for another operation on GPU %s: %w", uuids[0], err)
	}
	defer unlock()
	w.use.RLock()
	defer w.use.RUnlock()
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("wait until the driver can be used for GPU %s: %w", uuids[0], err)
	}
	return f()
}

// Exchange calls f while no operation runs, to replace the driver that operations use.
// Calls of Exchange and Suspend must not overlap.
func (w *Worker) Exchange(f func()) {
	w.Suspend()
	defer w.use.Unlock()
	w.suspended = false
	f()
}

// Suspend returns when no operation runs. Until the next Exchange, operations wait, also
// beyond the end of their contexts.
func (w *Worker) Suspend() {
	if !w.suspended {
		w.use.Lock()
		w.suspended = true
	}
}

// Try calls f, and schedules the GPU again after a failure. Without a driver it
// schedules nothing and returns nil: with the next one everything is tried.
func (w *Worker) Try(uuid gpu.UUID, f func() error) error {
	err := f()
	switch {
	case err == nil:
		w.Succeeded(uuid)
	case errors.Is(err, gpu.ErrNoDriver):
		return nil
	default:
		w.Failed(uuid)
	}
	return err
}

// Sweep calls do for each GPU that is due, until ctx ends, and logs failures with the
// message.
func (w *Worker) Sweep(ctx context.Context, message string, do func(context.Context, gpu.UUID) error) {
	w.Run(ctx, func(ctx context.Context, uuid gpu.UUID) {
		if err := do(ctx, uuid); err != nil && ctx.Err() == nil && w.IsNews(uuid) {
			klog.FromContext(ctx).Error(err, message, "gpu", uuid)
		}
	})
}

// Each calls f for all GPUs, concurrently, and joins the errors.
func Each(uuids []gpu.UUID, f func(gpu.UUID) error) error {
	errs := make([]error, len(uuids))
	var wg sync.WaitGroup
	for i, uuid := range uuids {
		wg.Go(func() { errs[i] = f(uuid) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Agenda has one entry per key. Its methods may be called concurrently.
type Agenda[K comparable] struct {
	// first and last are the limits of the delay after a failure, which doubles
	// each time.
	first, last time.Duration
	wake        chan struct{}

	mu       sync.Mutex
	due      map[K]time.Time
	failures map[K]int
}

// New returns an empty agenda. The delay after consecutive failures grows from
// first to last.
func New[K comparable](first, last time.Duration) *Agenda[K] {
	return &Agenda[K]{
		first: first, last: last, wake: make(chan struct{}, 1),
		due: map[K]time.Time{}, failures: map[K]int{},
	}
}

// Run calls do for each key that is due, concurrently for several keys, and
// even if an earlier call for the same key has not returned. It returns when
// ctx has ended and all calls have returned.
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
			wg.Go(func() { do(ctx, key) })
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
		if wait := at.Sub(now); wait > 0 {
			next = min(next, wait)
			continue
		}
		due = append(due, key)
		delete(a.due, key)
	}
	return due, next
}

// At makes Run call do for the key at that time, or earlier.
func (a *Agenda[K]) At(key K, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if before, ok := a.due[key]; ok && before.Before(at) {
		return
	}
	a.due[key] = at
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// Failed makes Run call do for the key again after a delay, which grows with
// the number of consecutive failures.
func (a *Agenda[K]) Failed(key K) {
	a.mu.Lock()
	wait := min(a.first<<min(a.failures[key], 10), a.last)
	a.failures[key]++
	a.mu.Unlock()
	a.At(key, time.Now().Add(wait))
}

// Succeeded resets the key's count of consecutive failures.
func (a *Agenda[K]) Succeeded(key K) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.failures, key)
}

// IsNews reports whether to log the key's last failure: the first ones, and
// then fewer and fewer.
func (a *Agenda[K]) IsNews(key K) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return bits.OnesCount(uint(a.failures[key])) == 1
}
