package agenda

import (
	"context"
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
