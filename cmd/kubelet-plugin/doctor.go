package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tessera-dra/tessera/pkg/node"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
)

const doctorHelp = `Compare what this node's plugin has written down (the journal), what container
runtimes read (the CDI directory) and what is there (the GPUs, their MIG
instances and settings, and MPS daemons), and say what doesn't fit, where, and
what to do about it.

It changes nothing and disturbs nobody: run it whenever you like, whether the
plugin runs or not. What a pod that is just starting or ending leaves
unfinished is looked at again, for a quarter of a minute, and only told if it
stays. Where many partitions are made or destroyed at once it may take longer:
then ask again.

  trouble    must not be; something has to be done. The exit status is 1
  leftover   this driver's own, in use by nobody, and goes by itself; with
             --strict it counts as trouble
  note       worth knowing, such as MIG instances that others have made

In the plugin's pod the flags default to those of the plugin itself. On a host,
as root, give those that its plugin has, if they aren't the defaults.`

const doctorExamples = `  kubectl exec -n tessera-system daemonset/tessera-node -- kubelet-plugin doctor
  kubectl exec -n tessera-system tessera-node-x7k2p -- kubelet-plugin doctor -o json
  kubelet-plugin doctor --strict`

// doctorCommand is `kubelet-plugin doctor`.
func doctorCommand() *cobra.Command {
	var cfg node.Config
	var output string
	options := doctor.Options{Looks: 4, Pause: 5 * time.Second}
	cmd := &cobra.Command{
		Use:     "doctor",
		Short:   "Say what is wrong with what this node's plugin has prepared",
		Long:    doctorHelp,
		Example: doctorExamples,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("-o: %q is neither text nor json", output)
			}
			report, err := node.Examine(cmd.Context(), cfg, options)
			if err != nil {
				return err
			}
			if err := writeReport(cmd.OutOrStdout(), report, output); err != nil {
				return err
			}
			if !report.Healthy {
				return errors.New("this node needs care")
			}
			return nil
		},
	}
	plugin := pflag.NewFlagSet("kubelet-plugin", pflag.ContinueOnError)
	cfg.AddFlags(plugin)
	adopt(plugin, commandLine(1))
	for _, name := range []string{"host-root", "driver-root", "data-dir", "cdi-dir", "mps-socket"} {
		cmd.Flags().AddFlag(plugin.Lookup(name))
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.Flags().BoolVar(&options.Strict, "strict", false, "what is left over is trouble too")
	cmd.Flags().IntVar(&options.Looks, "looks", options.Looks, "how often to look before something counts as trouble")
	cmd.Flags().DurationVar(&options.Pause, "pause", options.Pause, "how long to wait between two looks")
	return cmd
}

// commandLine is that of a process; nil where it can't be read.
func commandLine(pid int) []string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return nil
	}
	return strings.Split(string(bytes.TrimRight(data, "\x00")), "\x00")
}

// adopt makes the flags' defaults those of a plugin's command line, as far as
// it is one: in the plugin's pod, it is process 1.
func adopt(flags *pflag.FlagSet, args []string) {
	if len(args) == 0 || filepath.Base(args[0]) != "kubelet-plugin" {
		return
	}
	flags.ParseErrorsAllowlist.UnknownFlags = true
	if err := flags.Parse(args[1:]); err != nil {
		return // it runs, so it is this program's fault; the defaults may do
	}
	flags.VisitAll(func(f *pflag.Flag) { f.DefValue, f.Changed = f.Value.String(), false })
}

func writeReport(w io.Writer, r doctor.Report, format string) error {
	if format == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	var b strings.Builder
	for _, f := range r.Findings {
		writeFinding(&b, f)
	}
	fmt.Fprintf(&b, "%s, %s, %s and %s made by this driver: ", count(r.GPUs, "GPU"), count(r.Claims, "claim"), count(r.Instances, "MIG instance"), count(r.Daemons, "MPS daemon"))
	if r.Healthy {
		b.WriteString("nothing is wrong.\n")
	} else {
		fmt.Fprintf(&b, "the same trouble in each of %s (if pods start or end here just now, ask again).\n", count(r.Looks, "look"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func writeFinding(b *strings.Builder, f doctor.Finding) {
	fmt.Fprintf(b, "%-9s %s: %s\n", strings.ToUpper(string(f.Level)), f.Check, f.What)
	for _, line := range [][2]string{{"claim", f.Claim}, {"GPU", string(f.GPU)}, {"device", f.Device}, {"file", f.Path}, {"do", f.Do}} {
		if line[1] != "" {
			fmt.Fprintf(b, "          %-7s %s\n", line[0], line[1])
		}
	}
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
