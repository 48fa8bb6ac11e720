// Package kubectl is kubectl gpu: each command has a package of its own.
package kubectl

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/doctor"
	"github.com/tessera-dra/tessera/pkg/kubectl/drain"
	"github.com/tessera-dra/tessera/pkg/kubectl/fits"
	"github.com/tessera-dra/tessera/pkg/kubectl/get"
	"github.com/tessera-dra/tessera/pkg/kubectl/gpumap"
	"github.com/tessera-dra/tessera/pkg/kubectl/policy"
	"github.com/tessera-dra/tessera/pkg/kubectl/slots"
	"github.com/tessera-dra/tessera/pkg/kubectl/template"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/top"
	"github.com/tessera-dra/tessera/pkg/kubectl/web"
	"github.com/tessera-dra/tessera/pkg/kubectl/why"
)

// Name is how the texts of all commands call the program.
const Name = "kubectl gpu"

// New makes the command of a version, with all subcommands.
func New(streams genericclioptions.IOStreams, s terminal.Screen, version string) *cobra.Command {
	o := cluster.NewOptions(streams, s)
	cmd := &cobra.Command{
		Use:   "kubectl-gpu",
		Short: "Show who has which part of which GPU, what else fits, and why a pod waits",
		Long: `Show who has which part of which GPU of a cluster with Tessera, what else fits,
why a pod waits, and what is wrong. It works with the rights of your kubeconfig, and
only drain changes something. What you may not read is named, and the rest is shown.`,
		Example: `  kubectl gpu map                  # each GPU, with its memory slots and the pods in them
  kubectl gpu slots --watch        # who gets which slot, and who leaves it
  kubectl gpu fits 3g.40gb         # where, and how many
  kubectl gpu why my-pod -n team   # the reason, and what would change it
  kubectl gpu get -o wide          # a row for each device that a claim has
  kubectl gpu top                  # memory and utilization by GPU, partition, share and pod
  kubectl gpu doctor               # what is wrong on any node
  kubectl gpu policy shares        # what a SharingPolicy does
  kubectl gpu drain node-3/0 --dry-run
  kubectl gpu template node-3      # the ResourceSlices of a new node like it, for autoscalers
  kubectl gpu web                  # the map as a page in the browser`,
		Version: version, SilenceUsage: true, SilenceErrors: true,
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: Name},
	}
	cmd.SetOut(o.Out)
	cmd.SetErr(o.ErrOut)
	o.Flags.AddFlags(cmd.PersistentFlags())
	shortenHelp(cmd)
	cmd.AddCommand(gpumap.Command(o), slots.Command(o), fits.Command(o), why.Command(o), get.Command(o), doctor.Command(o), policy.Command(o), drain.Command(o), top.Command(o), template.Command(o), web.Command(o), options())
	return cmd
}

// shortenHelp leaves the flags of all commands out of their help, but for -n: there are
// twenty of them, and kubectl's own help leaves them out too. They stay complete in a shell.
func shortenHelp(root *cobra.Command) {
	usage := root.UsageFunc()
	hide := func(hidden bool) {
		root.PersistentFlags().VisitAll(func(f *pflag.Flag) { f.Hidden = hidden && f.Name != "namespace" })
	}
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		hide(true)
		defer hide(false)
		if err := usage(cmd); err != nil {
			return err
		}
		if !cmd.HasAvailableSubCommands() { // usage ends with such a line where there are any
			fmt.Fprintln(cmd.OutOrStderr())
		}
		_, err := fmt.Fprintf(cmd.OutOrStderr(), "Use \"%s options\" for the flags that all commands have, such as --context.\n", Name)
		return err
	})
}

// options returns kubectl gpu options.
func options() *cobra.Command {
	return &cobra.Command{
		Use: "options", Short: "List the flags that all commands have: the cluster, the user, and the connection",
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintf(cmd.OutOrStdout(), "These flags go with any command:\n\n%s", cmd.InheritedFlags().FlagUsages())
		},
	}
}
