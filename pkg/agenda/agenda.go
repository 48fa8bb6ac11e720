// Package agenda schedules work by key, for example by GPU: at a given time,
// and again after a failure, with growing delays.
//
// It imports no package of this project, and every package may import it.
package agenda

import (
	"context"
	"math/bits"
	"sync"
	"time"
)

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
