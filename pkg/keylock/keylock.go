// Package keylock has locks by key: operations on one object run one after the
// other, those on different objects at the same time, and waiting ends with a
// context.
//
// It imports no package of this project, and every package may import it.
package keylock

import (
	"context"
	"sync"
)

// Locks has one lock for each key. The zero value is ready to use; it must not
// be copied. A key that is neither locked nor waited for uses no memory.
type Locks[K comparable] struct {
	mu sync.Mutex
	of map[K]*lock
}

type lock struct {
	token chan struct{}
	users int // goroutines that hold the lock or wait for it
}

// Lock takes the locks of the keys, one after the other: all callers must name
// several keys in the same order. If the context ends first, it returns the
// context's cause and holds no lock.
func (l *Locks[K]) Lock(ctx context.Context, keys ...K) (unlock func(), _ error) {
	var held []func()
	unlock = func() {
		for _, giveBack := range held {
			giveBack()
		}
	}
	for _, key := range keys {
		giveBack, err := l.lock(ctx, key)
		if err != nil {
			unlock()
			return nil, err
		}
		held = append(held, giveBack)
	}
	return unlock, nil
}

func (l *Locks[K]) lock(ctx context.Context, key K) (unlock func(), _ error) {
	one := l.use(key)
	unlock = func() {
		<-one.token
		l.leave(key, one)
	}
	select {
	case one.token <- struct{}{}:
		if ctx.Err() != nil { // both were possible
			unlock()
			return nil, context.Cause(ctx)
		}
		return unlock, nil
	case <-ctx.Done():
		l.leave(key, one)
		return nil, context.Cause(ctx)
	}
}

// InUse reports whether somebody holds the key's lock or waits for it.
func (l *Locks[K]) InUse(key K) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.of[key] != nil
}

func (l *Locks[K]) use(key K) *lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of = map[K]*lock{}
	}
	if l.of[key] == nil {
		l.of[key] = &lock{token: make(chan struct{}, 1)}
	}
	l.of[key].users++
	return l.of[key]
}

func (l *Locks[K]) leave(key K, one *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.users--; one.users == 0 {
		delete(l.of, key)
	}
}
