package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/tessera-dra/tessera/pkg/notify"
)

// timeout is how long a change of one node may take, and timeoutPerNode how much longer
// with each further node. Nothing is that slow unless it is broken.
const timeout, timeoutPerNode = 3 * time.Minute, 2 * time.Second

// watched is the state T that a watch has seen.
type watched[T any] struct {
	timeout time.Duration // of await

	mu   notify.Mutex
	seen T
	err  error // the watch failed, or ended
}

// follow adds each event to the state of w, until the watch ends. of names the watched
// objects in errors.
func follow[T any, O runtime.Object](w *watched[T], events watch.Interface, of string, add func(watch.EventType, O, time.Duration)) {
	defer events.Stop()
	for e := range events.ResultChan() {
		at := monotonic()
		o, ok := e.Object.(O)
		w.mu.Change(func() {
			if !ok {
				w.err = fmt.Errorf("watch %s: %v", of, e.Object)
				return
			}
			add(e.Type, o, at)
		})
	}
	w.mu.Change(func() { w.err = errors.Join(w.err, fmt.Errorf("the watch of %s ended", of)) })
}

// await waits until ok returns true for the state that the watch has seen. It returns the
// watch's error, or the cause of ctx's end, such as the timeout.
func (w *watched[T]) await(ctx context.Context, ok func(T) bool) error {
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	var failed error
	err := w.mu.Wait(ctx, func() bool {
		failed = w.err
		return failed != nil || ok(w.seen)
	})
	if err != nil {
		return context.Cause(ctx)
	}
	return failed
}

// monotonic is the time of the kernel log.
func monotonic() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err) // every Linux has this clock
	}
	return time.Duration(now.Nano())
}
