package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tessera-dra/tessera/pkg/node"
	"github.com/tessera-dra/tessera/pkg/node/doctor"
)

const doctorHelp = `Compare the plugin's journal, the CDI directory, and the GPUs of this node with
their MIG instances, settings and MPS daemons. Report differences, and say where
they are and what to do about them.

It changes nothing and can be run at any time, whether the plugin runs or not.
Pods that are starting or ending leave unfinished state for a moment: such
findings are checked again for 15 seconds and reported if they stay. If many
partitions are created or destroyed at once it may take longer: run it again.

  trouble    must not be; something has to be done. The exit status is 1
  leftover   created by this driver, not in use, and removed automatically;
             with --strict it counts as trouble
  note       for information, such as MIG instances that others have created

In the plugin's pod the flags default to those of the plugin itself. On a host,
as root, set the flags of its plugin if they aren't the defaults.`

const doctorExamples = `  kubectl exec -n tessera-system daemonset/tessera-node -- kubelet-plugin doctor
  kubectl exec -n tessera-system tessera-node-x7k2p -- kubelet-plugin doctor -o json
  kubelet-plugin doctor --strict`

// doctorCommand returns the command `kubelet-plugin doctor`.
func doctorCommand() *cobra.Command {
	var cfg node.Config
	var output string
	options := doctor.Options{Looks: 4, Pause: 5 * time.Second}
	cmd := &cobra.Command{
		Use:     "doctor",
		Short:   "Report problems with the claims that this node's plugin has prepared",
		Long:    doctorHelp,
		Example: doctorExamples,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("-o: %q is neither text nor json", output)
			}
			report, err := doctor.Run(cmd.Context(), doctor.Places{
				HostRoot: cfg.HostRoot, DriverRoot: cfg.DriverRoot, DataDir: cfg.DataDir, CDIDir: cfg.CDIDir, MPSSocket: cfg.MPSSocket, HookDirs: cfg.HookDirs(),
			}, options)
			if err != nil {
				return err
			}
			if err := writeReport(cmd.OutOrStdout(), report, output); err != nil {
				return err
			}
			if !report.Healthy {
				return errors.New("problems were found on this node")
			}
			return nil
		},
	}
	plugin := pflag.NewFlagSet("kubelet-plugin", pflag.ContinueOnError)
	cfg.AddFlags(plugin)
	adopt(plugin, pluginOf("/proc", os.Getpid()))
	for _, name := range []string{"host-root", "driver-root", "kubelet-root", "data-dir", "cdi-dir", "mps-socket"} {
		cmd.Flags().AddFlag(plugin.Lookup(name))
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.Flags().BoolVar(&options.Strict, "strict", false, "count leftovers as trouble")
	cmd.Flags().IntVar(&options.Looks, "looks", options.Looks, "number of checks that must agree before a finding counts as trouble")
	cmd.Flags().DurationVar(&options.Pause, "pause", options.Pause, "time between two checks")
	return cmd
}

// pluginOf returns the command line of the plugin in the container of a process: of the
// one with the same mount namespace. Nil if there is none.
func pluginOf(proc string, pid int) []string {
	own, err := os.Readlink(filepath.Join(proc, strconv.Itoa(pid), "ns/mnt"))
	if err != nil {
		return nil
	}
	host, err := procfs.NewFS(proc)
	if err != nil {
		return nil
	}
	processes, err := host.AllProcs()
	if err != nil {
		return nil
	}
	for _, p := range processes {
		args, err := p.CmdLine()
		if err != nil || len(args) == 0 || filepath.Base(args[0]) != "kubelet-plugin" || len(args) > 1 && !strings.HasPrefix(args[1], "-") {
			continue // another program, or a doctor
		}
		if namespace, err := os.Readlink(filepath.Join(proc, strconv.Itoa(p.PID), "ns/mnt")); err == nil && namespace == own {
			return args
		}
	}
	return nil
}

// adopt sets the defaults of flags from the command line of a plugin, if there is one.
func adopt(flags *pflag.FlagSet, args []string) {
	if len(args) == 0 {
		return
	}
	flags.ParseErrorsAllowlist.UnknownFlags = true
	if err := flags.Parse(args[1:]); err != nil {
		return // the plugin runs with these flags, so this program can't parse them; use the defaults
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
		fmt.Fprintf(&b, "the same trouble in each of %s (if pods are starting or ending on this node, run it again).\n", count(r.Looks, "check"))
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
