// Command mps-supervisor starts, watches and stops the MPS control daemons of
// one node.
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
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/failpoint"
	"github.com/tessera-dra/tessera/pkg/mps/supervisor"
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
		fmt.Fprintln(os.Stderr, "mps-supervisor:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	cfg := supervisor.Config{Steps: failpoint.FromEnvironment()}
	logging := logsapi.NewLoggingConfiguration()
	cmd := &cobra.Command{
		Use:   "mps-supervisor",
		Short: "Start, watch and stop the MPS control daemons of this node",
		Long: `Runs the host's nvidia-cuda-mps-control, one daemon for each GPU, MIG partition or
claim that is shared by MPS, as the kubelet plugin of the node asks over the unix
socket RUN-DIR/supervisor.sock. It knows no claims and talks to no Kubernetes.

Daemons don't end with it: they are processes of the host, in cgroups of their own
and with the host's files. The next supervisor takes them over, without their
clients noticing. A daemon that dies is started again with its limits, at once and
then with growing pauses; the programs that were its clients have failed by then.

Each daemon has a directory, RUN-DIR/d/NAME:

    daemon.json   what is wanted, and which process it is
    pipe          its sockets: its own CUDA_MPS_PIPE_DIRECTORY
    clients       those of them that containers see, as theirs
    log           control.log and server.log; start.log if it refused to start
    shm           its /dev/shm

To look at one by hand, on the host:

    echo get_server_list | CUDA_MPS_PIPE_DIRECTORY=RUN-DIR/d/NAME/pipe nvidia-cuda-mps-control

It needs the host's PIDs, and to be privileged: it starts programs in the host's file
system (chroot, mount), moves them out of its container's cgroup, and ends them.`,
		Example: `  # in a pod of the node
  mps-supervisor --host-root /host
  # on the host itself, beside another one
  mps-supervisor --run-dir /run/mps-trial -v 4`,
		Version: version, Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := logsapi.ValidateAndApply(logging, nil); err != nil {
				return err
			}
			s, err := supervisor.New(cfg)
			if err != nil {
				return err
			}
			return s.Run(klog.NewContext(cmd.Context(), klog.Background()))
		},
	}
	cfg.AddFlags(cmd.Flags())
	logsapi.AddFlags(logging, cmd.Flags())
	return cmd
}
