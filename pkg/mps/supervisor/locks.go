package supervisor

import (
	"context"
	"sync"
)

// locks are one lock a name; waiting ends with the context.
type locks struct {
	mu sync.Mutex
	of map[string]*lock
}

type lock struct {
	token chan struct{}
	users int // who has it or waits for it
}

func newLocks() *locks { return &locks{of: map[string]*lock{}} }

// lock takes the lock of a name. The error is the context's.
func (l *locks) lock(ctx context.Context, name string) (unlock func(), _ error) {
	one := l.use(name)
	select {
	case one.token <- struct{}{}:
		return func() {
			<-one.token
			l.leave(name, one)
		}, nil
	case <-ctx.Done():
		l.leave(name, one)
		return nil, ctx.Err()
	}
}

func (l *locks) use(name string) *lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[name] == nil {
		l.of[name] = &lock{token: make(chan struct{}, 1)}
	}
	l.of[name].users++
	return l.of[name]
}

func (l *locks) leave(name string, one *lock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.users--; one.users == 0 {
		delete(l.of, name)
	}
}
