// Package command runs the main function of the commands of this tree that take long.
package command

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Run runs a command and returns its exit status. The command's context ends when the process is
// interrupted, so that the command can remove what it has made. If it fails, Run prints the error
// after the command's name, and returns 1.
func Run(name string, run func(context.Context) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		return 1
	}
	return 0
}
