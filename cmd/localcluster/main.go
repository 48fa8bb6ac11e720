// Command localcluster runs real Kubernetes clusters on this machine; see
// test/cluster.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
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
	// A command that runs inside a machine has printed its own error.
	var failed *exec.ExitError
	if errors.As(err, &failed) && failed.ExitCode() > 0 {
		os.Exit(failed.ExitCode())
	}
	fmt.Fprintln(os.Stderr, "localcluster:", err)
	os.Exit(1)
}
