package healthmonitor

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

const (
	// resetBegunWithin is how long a reset waits until NVML is closed.
	resetBegunWithin = time.Minute
	// forgetWithin bounds the time to find out whether NVML lists a GPU.
	forgetWithin = 30 * time.Second
)

// ErrResetImpossible says that a reset would fail each time.
var ErrResetImpossible = errors.New("the GPU can't be reset alone")

// Order is a request that only whoever opens and closes NVML can carry out (pkg/node/driver).
type Order struct {
	GPU gpu.UUID
	// Reset the GPU while NVML is closed; otherwise remove it from the facts, unless NVML
	// lists it.
	Reset bool
	// taken is set by the one of the two sides that decides whether it is carried out.
	taken  atomic.Bool
	result chan error
}

// Take reports whether the order still stands. Whoever has taken it calls Done.
func (o *Order) Take() bool { return o.taken.CompareAndSwap(false, true) }

// Done passes the result to whoever waits for it.
func (o *Order) Done(err error) { o.result <- err }

// Orders has the orders that wait.
func (m *Monitor) Orders() <-chan *Order { return m.orders }

// Reset resets a GPU with the driver's nvidia-smi, which refuses while any program uses it.
// It returns when that has ended or hangs; the error, which may be ErrResetImpossible, has its
// words. It returns an error if NVML can't be closed, or isn't open, for a minute.
func (m *Monitor) Reset(ctx context.Context, uuid gpu.UUID) error {
	ctx, cancel := context.WithTimeoutCause(ctx, resetBegunWithin, fmt.Errorf("close NVML: %w", context.DeadlineExceeded))
	defer cancel()
	return m.order(ctx, &Order{GPU: uuid, Reset: true})
}

// OrderForget removes a GPU from the facts that NVML doesn't list any more. It returns an error if
// NVML lists the GPU, or isn't open before ctx ends. If NVML lists the GPU later, it is back.
func (m *Monitor) OrderForget(ctx context.Context, uuid gpu.UUID) error {
	return m.order(ctx, &Order{GPU: uuid})
}

// order returns the result of an order. Until it is taken, the end of ctx withdraws it.
func (m *Monitor) order(ctx context.Context, o *Order) error {
	o.result = make(chan error, 1)
	m.cfg.Facts.RereadGPUs() // driver also takes an order that was withdrawn and is in the way
	select {
	case m.orders <- o:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	m.cfg.Facts.RereadGPUs()
	select {
	case err := <-o.result:
		return err
	case <-ctx.Done():
	}
	if o.Take() {
		return context.Cause(ctx)
	}
	return <-o.result
}
