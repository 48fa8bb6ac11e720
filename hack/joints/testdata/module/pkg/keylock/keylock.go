// Package keylock has a lock that isn't sync's.
package keylock

import "sync"

// Locks has a lock for each key.
type Locks[K comparable] struct {
	mu sync.Mutex // want: lock
	of map[K]chan struct{}
}

// Lock takes the lock of a key.
func (l *Locks[K]) Lock(K) { l.mu.Lock() }
