package keylock

import (
	"context"
	"errors"
	"sync"
	"testing"
)

func TestLocks(t *testing.T) {
	var l Locks[string]
	unlock, err := l.Lock(t.Context(), "a", "b")
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("no time")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if _, err := l.Lock(ctx, "0", "b"); !errors.Is(err, why) {
		t.Errorf("a key that is taken: %v", err)
	}
	other, err := l.Lock(t.Context(), "0", "c")
	if err != nil {
		t.Fatal(err)
	}
	other()
	if !l.InUse("a") || l.InUse("0") {
		t.Errorf("in use: %v", l.of)
	}
	for range 100 { // the end of a context is heard also where the key is free
		if _, err := l.Lock(ctx, "free"); !errors.Is(err, why) {
			t.Fatalf("a key that is free: %v", err)
		}
	}
	unlock()
	if len(l.of) != 0 {
		t.Errorf("keys that nobody has: %v", l.of)
	}
}

func TestLocksKeepOthersOut(t *testing.T) {
	var l Locks[int]
	var all sync.WaitGroup
	inside := [2]int{} // checked by the race detector and by the count
	for i := range 200 {
		all.Go(func() {
			unlock, err := l.Lock(t.Context(), i%2)
			if err != nil {
				t.Error(err)
				return
			}
			defer unlock()
			inside[i%2]++
		})
	}
	all.Wait()
	if inside != [2]int{100, 100} {
		t.Errorf("counted %v", inside)
	}
}
