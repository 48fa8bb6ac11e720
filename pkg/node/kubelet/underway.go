package kubelet

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
)

// underway has the kubelet's calls that have not ended.
type underway struct {
	mu    sync.Mutex
	last  uint64
	began map[uint64]time.Time
}

// count is a gRPC interceptor that records when calls begin and end.
func (u *underway) count(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	u.mu.Lock()
	if u.began == nil {
		u.began = map[uint64]time.Time{}
	}
	u.last++
	id := u.last
	u.began[id] = time.Now()
	u.mu.Unlock()
	defer func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		delete(u.began, id)
	}()
	return next(ctx, req)
}

// OldestCall returns the duration of the oldest call of the kubelet that has not
// ended; 0 if there is none.
func (p *Plugin) OldestCall() time.Duration {
	p.underway.mu.Lock()
	defer p.underway.mu.Unlock()
	var oldest time.Duration
	for _, at := range p.underway.began {
		oldest = max(oldest, time.Since(at))
	}
	return oldest
}
