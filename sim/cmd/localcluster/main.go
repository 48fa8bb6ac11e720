// Command localcluster runs real Kubernetes clusters on this machine; see
// sim/cluster.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newCommand().ExecuteContext(ctx)
	stop()
	if err == nil {
		return
	}
	if failed, ok := errors.AsType[machineError](err); ok {
		os.Exit(int(failed))
	}
	fmt.Fprintln(os.Stderr, "localcluster:", err)
	os.Exit(1)
}

// machineError is the exit status of a command that ran inside a machine and
// has printed its own error.
type machineError int

func (f machineError) Error() string { return fmt.Sprintf("exit status %d", int(f)) }
