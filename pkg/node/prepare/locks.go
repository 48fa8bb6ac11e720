package prepare

import (
	"context"
	"sync"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// claimKey and gpuKey name what a lock is for.
func claimKey(claimUID string) string { return "claim/" + claimUID }
func gpuKey(uuid gpu.UUID) string     { return "gpu/" + string(uuid) }

// locks are locks by key. A set of keys is taken at once or not at all, so that
// no goroutine waits for one key while it holds another and there is no lock
// order; and waiting ends with the context.
type locks struct {
	mu      sync.Mutex
	taken   map[string]bool
	changed chan struct{} // closed at each unlock
}

func newLocks() *locks {
	return &locks{taken: map[string]bool{}, changed: make(chan struct{})}
}

// lock takes the keys, which differ from each other. The error is the
// context's cause.
func (l *locks) lock(ctx context.Context, keys ...string) (unlock func(), _ error) {
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		taken, changed := l.tryLock(keys)
		if taken {
			return func() { l.unlock(keys) }, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// tryLock takes all keys or none. The channel is closed at the next unlock.
func (l *locks) tryLock(keys []string) (bool, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range keys {
		if l.taken[k] {
			return false, l.changed
		}
	}
	for _, k := range keys {
		l.taken[k] = true
	}
	return true, l.changed
}

// isTaken says whether somebody has the key now.
func (l *locks) isTaken(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.taken[key]
}

func (l *locks) unlock(keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range keys {
		delete(l.taken, k)
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

// broadcast wakes all waiting goroutines at once.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{}
}

func newBroadcast() *broadcast { return &broadcast{ch: make(chan struct{})} }

// next is closed at the next tell.
func (b *broadcast) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ch
}

func (b *broadcast) tell() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.ch)
	b.ch = make(chan struct{})
}
