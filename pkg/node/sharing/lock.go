package sharing

import (
	"context"
	"sync"
)

// locks are one lock a key; waiting ends with the context. Who needs several
// takes them in ascending order.
type locks struct {
	mu sync.Mutex
	of map[string]chan struct{}
}

func newLocks() *locks { return &locks{of: map[string]chan struct{}{}} }

// lockAll takes the locks of the keys, which are in ascending order. The error is
// the context's cause.
func lockAll[K ~string](ctx context.Context, l *locks, keys []K) (unlock func(), _ error) {
	var held []chan struct{}
	unlock = func() {
		for _, token := range held {
			<-token
		}
	}
	for _, key := range keys {
		token := l.token(string(key))
		select {
		case token <- struct{}{}:
			held = append(held, token)
		case <-ctx.Done():
			unlock()
			return nil, context.Cause(ctx)
		}
	}
	return unlock, nil
}

func (l *locks) token(key string) chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[key] == nil {
		l.of[key] = make(chan struct{}, 1)
	}
	return l.of[key]
}
