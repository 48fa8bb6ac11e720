// Package notify wakes goroutines that wait for a change of the state that a mutex guards.
package notify

import (
	"context"
	"sync"
)

// Mutex is a mutex whose Change wakes the goroutines that wait for a change. The zero value
// is unlocked.
type Mutex struct {
	sync.Mutex
	changed chan struct{} // closed, and set to nil, by Wake; nil: no goroutine waits
}

// Change calls f with the lock held, and wakes the goroutines that wait.
func (m *Mutex) Change(f func()) {
	m.Lock()
	defer m.Unlock()
	f()
	m.Wake()
}

// Wake wakes the goroutines that wait for a change. It needs the lock.
func (m *Mutex) Wake() {
	if m.changed != nil {
		close(m.changed)
		m.changed = nil
	}
}

// Changed returns a channel that is closed at the next Change or Wake. It needs the lock.
func (m *Mutex) Changed() <-chan struct{} {
	if m.changed == nil {
		m.changed = make(chan struct{})
	}
	return m.changed
}

// Await returns once ok, which is called with the lock held, returns true.
func (m *Mutex) Await(ok func() bool) {
	for {
		changed := m.unless(ok)
		if changed == nil {
			return
		}
		<-changed
	}
}

// Wait returns nil once ok, which is called with the lock held, returns true, and the
// context's error if the context ends first.
func (m *Mutex) Wait(ctx context.Context, ok func() bool) error {
	for {
		changed := m.unless(ok)
		if changed == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// unless returns nil if ok returns true, and else what Changed returns. It makes no channel
// that nobody waits for: one of a synctest bubble can't be closed outside of it.
func (m *Mutex) unless(ok func() bool) <-chan struct{} {
	m.Lock()
	defer m.Unlock()
	if ok() {
		return nil
	}
	return m.Changed()
}
