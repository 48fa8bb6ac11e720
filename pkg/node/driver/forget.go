package driver

import (
	"context"
	"sync/atomic"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// forgetting requests that a GPU is forgotten.
type forgetting struct {
	uuid gpu.UUID
	// taken is set by the one of caller and Follower that decides whether it is done.
	taken  atomic.Bool
	result chan error
}

// Forget removes a GPU from the facts that NVML doesn't list any more. It returns an error if
// NVML lists the GPU, or there is no session before ctx ends. If NVML lists the GPU later, it
// is back.
func (f *Follower) Forget(ctx context.Context, uuid gpu.UUID) error {
	r := &forgetting{uuid: uuid, result: make(chan error, 1)}
	select {
	case f.forgettings <- r:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	f.cfg.Facts.RereadGPUs()
	select {
	case err := <-r.result:
		return err
	case <-ctx.Done():
	}
	if r.taken.CompareAndSwap(false, true) {
		return context.Cause(ctx)
	}
	return <-r.result
}

// forget forgets the GPU that is to be forgotten, if there is one.
func (f *Follower) forget(ctx context.Context, session *nvml.Session) {
	select {
	case r := <-f.forgettings:
		if !r.taken.CompareAndSwap(false, true) {
			return
		}
		err := session.Forget(r.uuid)
		if err == nil {
			f.cfg.Facts.Forget(r.uuid)
			f.seen.forget(ctx, r.uuid)
		}
		r.result <- err
	default:
	}
}
