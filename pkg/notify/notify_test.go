package notify_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/tessera-dra/tessera/pkg/notify"
)

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m notify.Mutex
		n := 0
		waited := make(chan error)
		go func() { waited <- m.Wait(t.Context(), func() bool { return n == 2 }) }()
		for range 2 {
			synctest.Wait()
			select {
			case err := <-waited:
				t.Fatalf("%v after %d changes, want 2", err, n)
			default:
			}
			m.Change(func() { n++ })
		}
		if err := <-waited; err != nil {
			t.Error(err)
		}
	})
}

func TestWaitEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var m notify.Mutex
	if err := m.Wait(ctx, func() bool { return false }); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want the context's error", err)
	}
}

func TestChanged(t *testing.T) {
	var m notify.Mutex
	m.Lock()
	first, again := m.Changed(), m.Changed()
	m.Unlock()
	m.Change(func() {})
	<-first
	<-again
	m.Lock()
	next := m.Changed()
	m.Unlock()
	select {
	case <-next:
		t.Error("a change is reported before it comes")
	default:
	}
}
