package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/cluster"
)

func (s *settings) loadImage() *cobra.Command {
	return &cobra.Command{
		Use: "load-image ARCHIVE...", Args: cobra.MinimumNArgs(1),
		Short: "Import image archives into every node",
		Long:  "Import image archives (docker save, or an OCI layout as tar) into every node.",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := s.open()
			if err != nil {
				return err
			}
			for _, archive := range args {
				fmt.Fprintf(cmd.ErrOrStderr(), "loading %s\n", archive)
				if err := c.LoadImage(cmd.Context(), archive); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

func (s *settings) exec() *cobra.Command {
	return &cobra.Command{
		Use: "exec MACHINE -- COMMAND [ARGUMENT...]", Args: cobra.MinimumNArgs(2),
		Short: "Run a command inside a machine's namespaces",
		Example: `  localcluster exec node-0 -- crictl ps
  localcluster exec node-0 -- ls /var/lib/kubelet/plugins_registry
  localcluster exec control-plane -- sh`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := s.open()
			if err != nil {
				return err
			}
			stdio := cluster.Stdio{In: os.Stdin, Out: os.Stdout, Err: os.Stderr}
			err = c.Run(cmd.Context(), args[0], stdio, args[1:]...)
			var failed *exec.ExitError
			if errors.As(err, &failed) && failed.ExitCode() > 0 {
				return machineError(failed.ExitCode())
			}
			return err
		},
	}
}

func (s *settings) power() *cobra.Command {
	return &cobra.Command{
		Use: "reboot MACHINE", Args: cobra.ExactArgs(1),
		Short: "Kill a machine with everything in it and switch it on again",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := s.open()
			if err != nil {
				return err
			}
			if err := c.PowerOff(cmd.Context(), args[0]); err != nil {
				return err
			}
			return c.PowerOn(cmd.Context())
		},
	}
}

func (s *settings) component() *cobra.Command {
	actions := map[string]func(context.Context, *cluster.Cluster, string, string) error{
		"kill": func(_ context.Context, c *cluster.Cluster, machine, component string) error {
			return c.Kill(machine, component)
		},
		"stop": func(ctx context.Context, c *cluster.Cluster, machine, component string) error {
			return c.Stop(ctx, machine, component)
		},
		"start": func(ctx context.Context, c *cluster.Cluster, machine, component string) error {
			return c.Start(ctx, machine, component)
		},
		"restart": func(ctx context.Context, c *cluster.Cluster, machine, component string) error {
			return c.Restart(ctx, machine, component)
		},
	}
	return &cobra.Command{
		Use: "component kill|stop|start|restart MACHINE COMPONENT", Args: cobra.ExactArgs(3),
		Short: "Kill, stop, start or restart a component of a machine",
		Example: `  localcluster component kill node-0 kubelet
  localcluster component stop control-plane kube-scheduler`,
		RunE: func(cmd *cobra.Command, args []string) error {
			action := actions[args[0]]
			if action == nil {
				return errors.New("want kill, stop, start or restart")
			}
			c, err := s.open()
			if err != nil {
				return err
			}
			return action(cmd.Context(), c, args[1], args[2])
		},
	}
}
