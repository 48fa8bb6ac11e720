// Package node has one of each kind that counts, and of each that doesn't.
package node

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"
)

type goer struct{}

// Go starts no goroutine itself.
func (goer) Go(f func()) { f() }

// Run starts goroutines.
func Run() {
	ctx := context.Background()
	go func() {}() // want: goroutine
	var wg sync.WaitGroup
	wg.Go(func() {}) // want: goroutine
	var group errgroup.Group
	group.Go(func() error { return nil })        // want: goroutine
	_ = group.TryGo(func() error { return nil }) // want: goroutine
	var waits wait.Group
	waits.Start(func() {})                                // want: goroutine
	waits.StartWithContext(ctx, func(context.Context) {}) // want: goroutine
	time.AfterFunc(time.Hour, func() {})                  // want: goroutine
	stop := context.AfterFunc(ctx, func() {})             // want: goroutine
	stop()
	goer{}.Go(func() {})
	wait.Until(func() {}, time.Hour, ctx.Done())
	time.After(time.Hour)
}
