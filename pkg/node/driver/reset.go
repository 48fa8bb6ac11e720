package driver

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

const (
	// resetWithin is how long a reset may take. It takes seconds.
	resetWithin = time.Minute
	// awaitClosed is how long a reset waits until NVML is closed.
	awaitClosed = time.Minute
)

var (
	// ErrResetImpossible says that a reset would fail each time.
	ErrResetImpossible = errors.New("the GPU can't be reset alone")
	// errResetHangs wraps ErrResetImpossible: the GPU, or its driver, hangs.
	errResetHangs = fmt.Errorf("nvidia-smi hangs: %w", ErrResetImpossible)
)

// Reset resets a GPU with the driver's nvidia-smi, which refuses while any program
// uses the GPU. NVML is closed meanwhile, because it uses all GPUs, and opened again;
// the facts stay. Reset returns when nvidia-smi has ended or hangs; the error, which
// may be ErrResetImpossible, has its words.
func (f *Follower) Reset(ctx context.Context, uuid gpu.UUID) error {
	return f.whileClosed(ctx, func(ctx context.Context, smi SMIFunc) error {
		f.resetting.Lock()
		defer f.resetting.Unlock()
		f.cfg.Step("reset.closed")
		defer f.cfg.Step("reset.done")
		return reset(ctx, smi, uuid, resetWithin)
	})
}

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
	reason := oneLine(out)
	if m := refusal.FindStringSubmatch(out); m != nil {
		reason = oneLine(m[1])
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%w (it has not ended within %s)", errResetHangs, within)
	case reason == "":
		return fmt.Errorf("nvidia-smi --gpu-reset: %w", err)
	case strings.HasPrefix(reason, "In use"):
		return fmt.Errorf("nvidia-smi --gpu-reset says: %s; a program that is in no pod with a claim has the GPU open, perhaps a monitor such as DCGM", reason)
	case strings.HasPrefix(reason, "Not Supported"):
		return fmt.Errorf("%w; nvidia-smi --gpu-reset says: %s", ErrResetImpossible, reason)
	}
	return fmt.Errorf("nvidia-smi --gpu-reset says: %s", reason)
}

// refusal is the line of nvidia-smi about a GPU that it doesn't reset:
// "  GPU 00000000:C1:00.0: In use by another client".
var refusal = regexp.MustCompile(`(?m)^\s*GPU \S+: (\S.*?)\s*$`)

// oneLine returns a program's output on one line, shortened, for an error.
func oneLine(out string) string {
	const most = 400
	s := strings.Join(strings.Fields(strings.ToValidUTF8(out, "�")), " ")
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// closing is something that is done while NVML is closed.
type closing struct {
	do func(context.Context, SMIFunc) error
	// taken is set by the one of caller and Follower that decides whether it is done.
	taken  atomic.Bool
	result chan error
}

// whileClosed calls do while no NVML session is open. It returns an error if the
// session can't be closed, or isn't open, within awaitClosed.
func (f *Follower) whileClosed(ctx context.Context, do func(context.Context, SMIFunc) error) error {
	c := &closing{do: do, result: make(chan error, 1)}
	late := time.NewTimer(awaitClosed)
	defer late.Stop()
	select {
	case f.closings <- c:
	case <-late.C:
		return fmt.Errorf("close NVML: %w", context.DeadlineExceeded)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	f.cfg.Facts.RereadGPUs()
	var err error
	select {
	case err := <-c.result:
		return err
	case <-late.C:
		err = fmt.Errorf("close NVML: %w", context.DeadlineExceeded)
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if c.taken.CompareAndSwap(false, true) {
		return err
	}
	return <-c.result
}

// nextClosing returns the closing that waits; nil if none does, or the session, or the rest
// of the earlier ones, can't be closed.
func (f *Follower) nextClosing(session *nvml.Session, rest error) *closing {
	var c *closing
	select {
	case c = <-f.closings:
	default:
	}
	if c == nil || !c.taken.CompareAndSwap(false, true) {
		return nil
	}
	if silent := session.Silent(); len(silent) > 0 {
		c.result <- fmt.Errorf("close NVML while a call doesn't return: %s: %w", strings.Join(silent, ", "), nvml.ErrNotResponding)
		return nil
	}
	if rest != nil {
		c.result <- fmt.Errorf("close NVML: %w", rest)
		return nil
	}
	return c
}

// closed is the error of a session that was closed for something.
type closed struct {
	*closing

	root driverroot.Root
	// failed says why NVML could not be closed; nil: it is closed.
	failed error
}

func (c *closed) Error() string { return "NVML was closed for a while" }

// run calls do, and passes its result on.
func (c *closed) run(ctx context.Context, host driverroot.Host) {
	switch {
	case c.failed != nil:
		c.result <- fmt.Errorf("close NVML: %w", c.failed)
	case ctx.Err() != nil:
		c.result <- context.Cause(ctx)
	default:
		c.result <- c.do(ctx, SMI(host, c.root))
	}
}
