package agenda

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestAgenda(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New[string](2*time.Second, 5*time.Second)
		begun := time.Now()
		var mu sync.Mutex
		var seen []time.Duration
		var news []bool
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			a.Run(ctx, func(_ context.Context, key string) {
				mu.Lock()
				defer mu.Unlock()
				seen = append(seen, time.Since(begun))
				if a.Failed(key); len(seen) == 5 {
					a.Succeeded(key)
				}
				news = append(news, a.IsNews(key))
			})
		}()
		a.At("a", begun.Add(time.Second))
		a.At("a", begun.Add(time.Minute)) // it was due before
		time.Sleep(25 * time.Second)
		cancel()
		<-done
		want := []time.Duration{1, 3, 7, 12, 17, 22, 24} // delays of 2, 4, 5, 5, 5; then of 2 again
		for i := range want {
			want[i] *= time.Second
		}
		if diff := cmp.Diff(want, seen); diff != "" {
			t.Errorf("calls of do (-want +got):\n%s", diff)
		}
		if want := []bool{true, true, false, true, false, true, true}; !slices.Equal(want, news) {
			t.Errorf("news: %v, want %v", news, want)
		}
	})
}

// TestDelayAfterFailure: nothing that is scheduled meanwhile shortens the delay after a
// failure, whether it comes during the failing call or after it.
func TestDelayAfterFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New[string](2*time.Second, time.Minute)
		begun := time.Now()
		var seen []time.Duration
		ctx, cancel := context.WithTimeout(t.Context(), 31*time.Second)
		defer cancel()
		a.At("a", begun)
		a.Run(ctx, func(_ context.Context, key string) {
			seen = append(seen, time.Since(begun))
			a.At(key, time.Now())
			time.Sleep(time.Second)
			a.At(key, time.Now())
			a.Failed(key)
			a.At(key, time.Now())
			a.At(key, time.Now().Add(-time.Minute))
		})
		want := []time.Duration{0, 3 * time.Second, 8 * time.Second, 17 * time.Second}
		if diff := cmp.Diff(want, seen); diff != "" {
			t.Errorf("calls of do (-want +got):\n%s", diff)
		}
	})
}

// TestScheduledDuringACall: a key that is scheduled while it is being worked on is worked
// on again afterwards, and not before.
func TestScheduledDuringACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New[string](time.Second, time.Minute)
		begun := time.Now()
		var seen []time.Duration
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		a.At("a", begun)
		a.Run(ctx, func(_ context.Context, key string) {
			if seen = append(seen, time.Since(begun)); len(seen) == 1 {
				a.At(key, time.Now())
				time.Sleep(5 * time.Second)
			}
		})
		if diff := cmp.Diff([]time.Duration{0, 5 * time.Second}, seen); diff != "" {
			t.Errorf("calls of do (-want +got):\n%s", diff)
		}
	})
}

func TestRetryNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New[string](10*time.Second, time.Minute)
		begun := time.Now()
		seen := map[string][]time.Duration{}
		var mu sync.Mutex
		ctx, cancel := context.WithTimeout(t.Context(), 24*time.Second)
		defer cancel()
		a.At("works", begun)
		a.At("fails", begun)
		time.AfterFunc(3*time.Second, a.RetryNow)
		a.Run(ctx, func(_ context.Context, key string) {
			mu.Lock()
			defer mu.Unlock()
			seen[key] = append(seen[key], time.Since(begun))
			var err error
			if key != "works" {
				err = errors.New("it fails")
			}
			_ = a.Tried(key, err)
		})
		want := map[string][]time.Duration{"works": {0}, "fails": {0, 3 * time.Second, 23 * time.Second}}
		if diff := cmp.Diff(want, seen); diff != "" {
			t.Errorf("calls of do (-want +got):\n%s", diff)
		}
	})
}

// TestScheduledDuringACallOfRetryNow: a key that is scheduled during a call that RetryNow has
// caused is worked on again, although the delay after its failure would not be over.
func TestScheduledDuringACallOfRetryNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New[string](10*time.Second, time.Minute)
		begun := time.Now()
		var seen []time.Duration
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		a.At("a", begun)
		time.AfterFunc(3*time.Second, a.RetryNow)
		time.AfterFunc(4*time.Second, func() { a.At("a", time.Now()) })
		a.Run(ctx, func(_ context.Context, key string) {
			var err error
			if seen = append(seen, time.Since(begun)); len(seen) == 1 {
				err = errors.New("it fails")
			} else {
				time.Sleep(2 * time.Second)
			}
			_ = a.Tried(key, err)
		})
		if diff := cmp.Diff([]time.Duration{0, 3 * time.Second, 5 * time.Second}, seen); diff != "" {
			t.Errorf("calls of do (-want +got):\n%s", diff)
		}
	})
}
