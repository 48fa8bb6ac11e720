package driver

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// resetWithin is how long a reset may take. It takes seconds.
const resetWithin = time.Minute

// errResetHangs wraps ErrResetImpossible: the GPU, or its driver, hangs.
var errResetHangs = fmt.Errorf("nvidia-smi hangs: %w", healthmonitor.ErrResetImpossible)

// AwaitReset returns when no reset is under way, after little more than resetWithin. None begins
// after the context of Run has ended. The process must not end before, because nvidia-smi ends
// with the container that it runs in.
func (f *Follower) AwaitReset() {
	f.resetting.Lock()
	defer f.resetting.Unlock()
}

// IsResetting reports whether a reset is under way.
func (f *Follower) IsResetting() bool {
	if f.resetting.TryLock() {
		f.resetting.Unlock()
		return false
	}
	return true
}

// reset runs nvidia-smi. The end of ctx doesn't interrupt a reset that has begun.
func reset(ctx context.Context, smi SMIFunc, uuid gpu.UUID, within time.Duration) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
	defer cancel()
	out, err := smi(ctx, "--gpu-reset", "-i", string(uuid))
	if err == nil {
		return nil
	}
	reason := driverroot.OneLine(out)
	if m := refusal.FindStringSubmatch(out); m != nil {
		reason = driverroot.OneLine(m[1])
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%w (it has not ended within %s)", errResetHangs, within)
	case reason == "":
		return fmt.Errorf("nvidia-smi --gpu-reset: %w", err)
	case strings.HasPrefix(reason, "In use"):
		return fmt.Errorf("nvidia-smi --gpu-reset says: %s; a program that is in no pod with a claim has the GPU open, perhaps a monitor such as DCGM", reason)
	case strings.HasPrefix(reason, "Not Supported"):
		return fmt.Errorf("%w; nvidia-smi --gpu-reset says: %s", healthmonitor.ErrResetImpossible, reason)
	}
	return fmt.Errorf("nvidia-smi --gpu-reset says: %s", reason)
}

// refusal is the line of nvidia-smi about a GPU that it doesn't reset:
// "  GPU 00000000:C1:00.0: In use by another client".
var refusal = regexp.MustCompile(`(?m)^\s*GPU \S+: (\S.*?)\s*$`)

// takeOrder carries out an order that waits, or returns it if NVML has to be closed for it.
// rest is why an earlier session can't be closed.
func (f *Follower) takeOrder(ctx context.Context, session *nvml.Session, rest error) *healthmonitor.Order {
	var o *healthmonitor.Order
	select {
	case o = <-f.cfg.Health.Orders():
	default:
	}
	silent := session.Silent()
	switch {
	case o == nil || !o.Take():
	case !o.Reset:
		o.Done(f.forget(ctx, session, o.GPU))
	case len(silent) > 0:
		o.Done(fmt.Errorf("close NVML while a call doesn't return: %s: %w", strings.Join(silent, ", "), nvml.ErrNotResponding))
	case rest != nil:
		o.Done(fmt.Errorf("close NVML: %w", rest))
	default:
		return o
	}
	return nil
}

// forget removes a GPU from the facts, unless NVML lists it.
func (f *Follower) forget(ctx context.Context, session *nvml.Session, uuid gpu.UUID) error {
	if err := session.Forget(uuid); err != nil {
		return err
	}
	f.cfg.Facts.Forget(uuid)
	f.seen.forget(ctx, uuid)
	return nil
}

// closed is the error of a session that was closed for an order.
type closed struct {
	*healthmonitor.Order

	root driverroot.Root
	// failed says why NVML could not be closed; nil: it is closed.
	failed error
}

func (c *closed) Error() string { return "NVML was closed for a while" }

// whileClosed carries out the order, a reset, while NVML, which uses all GPUs, is closed.
func (f *Follower) whileClosed(ctx context.Context, c *closed) {
	switch {
	case c.failed != nil:
		c.Done(fmt.Errorf("close NVML: %w", c.failed))
	case ctx.Err() != nil:
		c.Done(context.Cause(ctx))
	default:
		c.Done(f.reset(ctx, SMI(f.cfg.Opener.host, c.root), c.GPU))
	}
}

func (f *Follower) reset(ctx context.Context, smi SMIFunc, uuid gpu.UUID) error {
	f.resetting.Lock()
	defer f.resetting.Unlock()
	f.cfg.Steps.Reached("reset.closed")
	defer f.cfg.Steps.Reached("reset.done")
	return reset(ctx, smi, uuid, resetWithin)
}
