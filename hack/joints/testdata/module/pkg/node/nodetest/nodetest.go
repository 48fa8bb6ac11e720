// Package nodetest helps tests, so that nothing of it counts.
package nodetest

import "sync"

// Double is an interface.
type Double interface{ Do() }

type double struct {
	sync.Mutex
	do func()
}

// Run starts a goroutine.
func Run() { go double{}.do() }
