// Command kubelet-plugin prepares the GPUs of one node for the claims that they
// are allocated to.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json

	"github.com/tessera-dra/tessera/pkg/node"
)

// version is set by the linker.
var version = "unknown"

func main() {
	debug.SetGCPercent(40) // the load is low; save memory on every node
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := command().ExecuteContext(ctx)
	stop()
	logs.FlushLogs()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kubelet-plugin:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	cfg := node.Config{Version: version}
	logging := logsapi.NewLoggingConfiguration()
	cmd := &cobra.Command{
		Use:           "kubelet-plugin",
		Short:         "Prepare the GPUs of this node for the claims that they are allocated to",
		Args:          cobra.NoArgs,
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := logsapi.ValidateAndApply(logging, nil); err != nil {
				return err
			}
			if err := cfg.Validate(); err != nil {
				return err
			}
			return node.Run(cmd.Context(), cfg)
		},
	}
	cfg.AddFlags(cmd.Flags())
	logsapi.AddFlags(logging, cmd.Flags())
	cmd.AddCommand(doctorCommand())
	return cmd
}
