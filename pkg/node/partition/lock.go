package partition

import (
	"context"
	"sync"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// locks are one lock a GPU; waiting ends with the context.
type locks struct {
	mu sync.Mutex
	of map[gpu.UUID]chan struct{}
}

func newLocks() *locks { return &locks{of: map[gpu.UUID]chan struct{}{}} }

// lock takes the GPU's lock. The error is the context's cause.
func (l *locks) lock(ctx context.Context, uuid gpu.UUID) (unlock func(), _ error) {
	token := l.token(uuid)
	select {
	case token <- struct{}{}:
		return func() { <-token }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (l *locks) token(uuid gpu.UUID) chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of[uuid] == nil {
		l.of[uuid] = make(chan struct{}, 1)
	}
	return l.of[uuid]
}
