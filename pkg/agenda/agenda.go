// Package agenda says when which GPU is to be looked after: at a time that
// somebody has named, and again after a failure, with growing pauses.
//
// It imports nothing of this project, and everybody may import it.
package agenda

import (
	"context"
	"math/bits"
	"sync"
	"time"
)

// Agenda has one entry a key. Its methods may be called from everywhere at once.
type Agenda[K comparable] struct {
	// first and last bound the pause after a failure; it doubles in between.
	first, last time.Duration
	wake        chan struct{}

	mu       sync.Mutex
	due      map[K]time.Time
	failures map[K]int
}

// New returns an empty agenda. The pause after the first failure in a row is the
// one, and after many the other.
func New[K comparable](first, last time.Duration) *Agenda[K] {
	return &Agenda[K]{
		first: first, last: last, wake: make(chan struct{}, 1),
		due: map[K]time.Time{}, failures: map[K]int{},
	}
}

// Run calls do for each key that is due, for several at once and beside what it
// still does for the same one. It returns when ctx has ended and all calls have
// returned.
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

// takeDue returns the keys that are due and after which time the next one is.
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

// At has Run look after the key at that time, or before.
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

// Failed has Run look after the key again in a while: the longer, the more often
// it has failed in a row.
func (a *Agenda[K]) Failed(key K) {
	a.mu.Lock()
	wait := min(a.first<<min(a.failures[key], 10), a.last)
	a.failures[key]++
	a.mu.Unlock()
	a.At(key, time.Now().Add(wait))
}

// Succeeded ends the row of failures.
func (a *Agenda[K]) Succeeded(key K) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.failures, key)
}

// IsNews says whether the key's last failure is worth a line: the first ones are,
// and then fewer and fewer.
func (a *Agenda[K]) IsNews(key K) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return bits.OnesCount(uint(a.failures[key])) == 1
}
