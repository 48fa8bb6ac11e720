// Command kubectl-gpu is the kubectl plugin `kubectl gpu`: it shows who has which part
// of which GPU, how much more fits, why a pod waits, and which troubles there are. Only
// drain changes something.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/go-logr/logr/funcr"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/klog/v2"
)

// version is set by the linker.
var version = "unknown"

// Answers, not failures: they make the exit statuses 1 and 3.
var (
	errNo       = errors.New("no")
	errWarnings = errors.New("warnings")
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	as := calledAs(os.Args[0])
	streams := genericclioptions.IOStreams{
		In: os.Stdin, Out: naming{os.Stdout, as}, ErrOut: terminal{Writer: naming{os.Stderr, as}},
	}
	klog.SetLogger(onlyErrors(streams.ErrOut))
	err := command(streams, screenOf(os.Stdout)).ExecuteContext(ctx)
	stop()
	switch {
	case errors.Is(err, errNo):
		os.Exit(1)
	case errors.Is(err, errWarnings):
		os.Exit(3)
	case err != nil:
		fmt.Fprintln(streams.ErrOut, defaultName+":", err)
		os.Exit(2)
	}
}

// onlyErrors logs errors, and nothing else: the client libraries also log each warning of
// the API server, such as of fields that an older one doesn't know, which the commands ask
// it about on purpose.
func onlyErrors(w io.Writer) klog.Logger {
	return funcr.New(func(_, args string) { fmt.Fprintln(w, args) }, funcr.Options{Verbosity: -1})
}

// defaultName is how the texts of this program call it.
const defaultName = "kubectl gpu"

// calledAs returns how the user calls the program: kubectl runs the file kubectl-NAME,
// which krew makes with another name.
func calledAs(program string) string {
	name := strings.TrimSuffix(filepath.Base(program), ".exe")
	if as, ok := strings.CutPrefix(name, "kubectl-"); ok {
		return "kubectl " + strings.ReplaceAll(as, "_", "-")
	}
	return defaultName
}

// naming writes texts in which the program is called as the user calls it.
type naming struct {
	io.Writer

	as string
}

// Write implements io.Writer. A text that is written in parts has the name in one of them.
func (n naming) Write(p []byte) (int, error) {
	if n.as == defaultName {
		return n.Writer.Write(p)
	}
	if _, err := n.Writer.Write(bytes.ReplaceAll(p, []byte(defaultName), []byte(n.as))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// screen is where output goes.
type screen struct {
	width  int
	colour bool
}

// screenOf asks the terminal, if the file is one.
func screenOf(f *os.File) screen {
	s := screen{width: 120}
	if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
		_, no := os.LookupEnv("NO_COLOR")
		s = screen{width: width, colour: !no && os.Getenv("TERM") != "dumb"}
	}
	return s
}

// options are those of all subcommands.
type options struct {
	genericclioptions.IOStreams

	flags  *genericclioptions.ConfigFlags
	screen screen
	all    bool
	output string
}

func command(streams genericclioptions.IOStreams, s screen) *cobra.Command {
	streams.Out, streams.ErrOut = terminal{streams.Out, s.colour}, terminal{Writer: streams.ErrOut}
	o := &options{IOStreams: streams, flags: genericclioptions.NewConfigFlags(true), screen: s}
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
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: defaultName},
	}
	cmd.SetOut(streams.Out)
	cmd.SetErr(streams.ErrOut)
	o.flags.AddFlags(cmd.PersistentFlags())
	cmd.AddCommand(mapCommand(o), slotsCommand(o), fitsCommand(o), whyCommand(o), getCommand(o), doctorCommand(o), policyCommand(o), drainCommand(o), topCommand(o), templateCommand(o), webCommand(o))
	return cmd
}

// addNamespaces adds -A.
func (o *options) addNamespaces(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&o.all, "all-namespaces", "A", false, "all namespaces, also if -n is given")
}

// addOutput adds -o.
func (o *options) addOutput(cmd *cobra.Command, forms string) {
	cmd.Flags().StringVarP(&o.output, "output", "o", "", "output format: "+forms)
}

// maxFile is how large a file may be.
const maxFile = 1 << 20

// readFile reads a file that the user names; - is the standard input.
func readFile(name string, in io.Reader) ([]byte, error) {
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	out, err := io.ReadAll(io.LimitReader(in, maxFile))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return out, nil
}

// isDocument reports whether the output is JSON or YAML.
func (o *options) isDocument() bool { return o.output == "json" || o.output == "yaml" }

// namespace is that of -n; "" for all.
func (o *options) namespace() string {
	if o.all || o.flags.Namespace == nil {
		return ""
	}
	return *o.flags.Namespace
}
