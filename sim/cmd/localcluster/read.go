package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/sim/cluster"
	"github.com/tessera-dra/tessera/sim/manifest"
)

func (s *settings) kubeconfig() *cobra.Command {
	return &cobra.Command{
		Use: "kubeconfig", Args: cobra.NoArgs,
		Short: "Print the path of the administrator's kubeconfig",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.open()
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), c.KubeconfigPath())
			return nil
		},
	}
}

func (s *settings) binary() *cobra.Command {
	return &cobra.Command{
		Use: "binary NAME", Args: cobra.ExactArgs(1),
		Short: "Print the path of one of the cluster's programs (kubectl, helm, ctr …)",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := s.open()
			if err != nil {
				return err
			}
			path := c.Binary(args[0])
			if _, err := os.Stat(path); err != nil {
				return fmt.Errorf("find the program %s: %w", args[0], err)
			}
			fmt.Fprintln(cmd.OutOrStdout(), path)
			return nil
		},
	}
}

func (s *settings) convert() *cobra.Command {
	return &cobra.Command{
		Use: "convert FILE...", Args: cobra.MinimumNArgs(1),
		Short: "Print manifests of resource.k8s.io/v1 in the version that the cluster serves",
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := s.open()
			if err != nil {
				return err
			}
			for _, file := range args {
				data, err := os.ReadFile(file)
				if err == nil {
					data, err = manifest.Convert(data, manifest.Version(c.Kubernetes()))
				}
				if err != nil {
					return fmt.Errorf("convert %s: %w", file, err)
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s\n---\n", data)
			}
			return nil
		},
	}
}

func (s *settings) logs() *cobra.Command {
	return &cobra.Command{
		Use: "logs [COMPONENT]", Args: cobra.MaximumNArgs(1),
		Short: "Print a component's logs of all machines, or name the log files",
		Example: `  localcluster logs
  localcluster logs kubelet`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := s.open()
			if err != nil {
				return err
			}
			return printLogs(cmd.OutOrStdout(), c, args)
		},
	}
}

func printLogs(w io.Writer, c *cluster.Cluster, args []string) error {
	found := false
	for _, machine := range c.Machines() {
		component := "*"
		if len(args) > 0 {
			component = args[0]
		}
		paths, err := filepath.Glob(c.LogPath(machine, component))
		if err != nil {
			return fmt.Errorf("find the logs of %s: %w", component, err)
		}
		for _, path := range paths {
			found = true
			if len(args) == 0 {
				fmt.Fprintln(w, path)
				continue
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return fmt.Errorf("read a log: %w", err)
			}
			fmt.Fprintf(w, "==> %s <==\n%s", path, data)
		}
	}
	if !found {
		return fmt.Errorf("no logs of component %v: localcluster logs lists the log files", args)
	}
	return nil
}
