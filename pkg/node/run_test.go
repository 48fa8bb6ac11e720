package node

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/tessera-dra/tessera/pkg/node/facts"
)

// A plugin that the kubelet doesn't register stops a rollout; a node without a
// driver doesn't.
func TestReadyOnceRegistered(t *testing.T) {
	p := &plugin{facts: facts.New("node-a")}
	if p.facts.Trouble() == nil {
		t.Fatal("there is no trouble without a driver")
	}
	if err := p.ready(); err == nil {
		t.Error("ready before the kubelet has registered it")
	}
	p.registered.Store(true)
	if err := p.ready(); err != nil {
		t.Errorf("registered, without a driver: %v, want ready", err)
	}
}

// TestEndIsNotWaitedForLong: a part that hangs doesn't keep the plugin from
// ending, so that the next one gets the lock.
func TestEndIsNotWaitedForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan error)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := endWithin(ctx, stopWithin, func() error { return <-hangs }); err == nil || !strings.Contains(err.Error(), "did not stop") {
			t.Errorf("got %v, want an error that says that the plugin did not stop", err)
		}
		hangs <- nil
		if err := endWithin(ctx, stopWithin, func() error { return os.ErrClosed }); !errors.Is(err, os.ErrClosed) {
			t.Errorf("got %v, want what the parts returned", err)
		}
	})
}
