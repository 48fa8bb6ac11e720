package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/tessera-dra/tessera/pkg/driverroot"
)

// programs runs programs of the driver, each command by one caller at a time. One that hangs in
// the driver can't be killed: run stops waiting for it, and doesn't start it again while it
// exists.
type programs struct {
	host driverroot.Host
	root driverroot.Root

	running sync.Map // the command lines of programs that have not ended
}

func newPrograms(host driverroot.Host, root driverroot.Root) *programs {
	return &programs{host: host, root: root}
}

// killWithin is how long a program may take to die.
const killWithin = time.Second

// errStillRuns says that a program hangs in the driver.
var errStillRuns = errors.New("it was started before, hangs in the driver and can't be killed")

// run runs the program and returns its output.
func (p *programs) run(ctx context.Context, name string, args ...string) (string, error) {
	line := strings.Join(append([]string{name}, args...), " ")
	if _, runs := p.running.LoadOrStore(line, true); runs {
		return "", fmt.Errorf("run %s: %w", line, errStillRuns)
	}
	cmd, err := p.root.Command(ctx, p.host, name, args...)
	if err != nil {
		p.running.Delete(line)
		return "", err
	}
	cmd.WaitDelay = killWithin
	type result struct {
		out []byte
		err error
	}
	ended := make(chan result, 1)
	go func() {
		out, err := cmd.CombinedOutput()
		p.running.Delete(line)
		ended <- result{out, driverroot.IgnoreWaitDelay(err)}
	}()
	select {
	case r := <-ended:
		return string(r.out), r.err
	case <-ctx.Done():
	}
	select {
	case r := <-ended:
		return string(r.out), r.err
	case <-time.After(2 * killWithin):
		return "", fmt.Errorf("run %s: %w", line, errors.Join(context.Cause(ctx), errStillRuns))
	}
}

// SMIFunc runs the host's nvidia-smi and returns all that it prints; an error if it
// reports a failure, or doesn't end before ctx.
type SMIFunc = func(ctx context.Context, args ...string) (string, error)

// SMI returns a function that runs the driver's nvidia-smi as the host would.
func SMI(host driverroot.Host, root driverroot.Root) SMIFunc {
	p := newPrograms(host, root)
	return func(ctx context.Context, args ...string) (string, error) { return p.run(ctx, "nvidia-smi", args...) }
}
