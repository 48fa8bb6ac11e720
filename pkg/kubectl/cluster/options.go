package cluster

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// Options are those of all subcommands.
type Options struct {
	genericclioptions.IOStreams

	Flags  *genericclioptions.ConfigFlags
	Screen terminal.Screen
	all    bool
	Output string
}

// NewOptions makes the options of commands that print to a screen.
func NewOptions(streams genericclioptions.IOStreams, s terminal.Screen) *Options {
	streams.Out, streams.ErrOut = terminal.Writer{Writer: streams.Out, Colour: s.Colour}, terminal.Writer{Writer: streams.ErrOut}
	return &Options{IOStreams: streams, Flags: genericclioptions.NewConfigFlags(true), Screen: s}
}

// AddNamespaces adds -A.
func (o *Options) AddNamespaces(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&o.all, "all-namespaces", "A", false, "all namespaces, also if -n is given")
}

// AddOutput adds -o.
func (o *Options) AddOutput(cmd *cobra.Command, forms string) {
	cmd.Flags().StringVarP(&o.Output, "output", "o", "", "output format: "+forms)
}

// IsDocument reports whether the output is JSON or YAML.
func (o *Options) IsDocument() bool { return o.Output == "json" || o.Output == "yaml" }

// Namespace is that of -n; "" for all.
func (o *Options) Namespace() string {
	if o.all || o.Flags.Namespace == nil {
		return ""
	}
	return *o.Flags.Namespace
}

// Answers, not failures: they make the exit statuses 1 and 3.
var (
	ErrNo       = errors.New("no")
	ErrWarnings = errors.New("warnings")
)

// CurrentNamespace is that of -n, or of the kubeconfig's context.
func (o *Options) CurrentNamespace() string {
	namespace, _, err := o.Flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return "default" // reading the kubeconfig has told the user of the error
	}
	return namespace
}

// ClusterName returns the name of the kubeconfig's context in use; empty if there is none.
func (o *Options) ClusterName() string {
	raw, err := o.Flags.ToRawKubeConfigLoader().RawConfig()
	if err != nil {
		return "" // reading the kubeconfig has told the user of the error
	}
	if c := o.Flags.Context; c != nil && *c != "" {
		return *c
	}
	return raw.CurrentContext
}

// OneOf returns an error if the output format is none of these.
func OneOf(output string, forms ...string) error {
	if slices.Contains(forms, output) {
		return nil
	}
	return fmt.Errorf("-o %s: want one of %s", output, strings.TrimPrefix(strings.Join(forms, ", "), ", "))
}

// Exactly wants one argument, which the text describes.
func Exactly(text string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("%s wants %s; kubectl gpu %s --help has examples", cmd.Name(), text, cmd.Name())
		}
		return nil
	}
}

// maxFile is how large a file may be.
const maxFile = 1 << 20

// ReadFile reads a file that the user names; - is the standard input.
func ReadFile(name string, in io.Reader) ([]byte, error) {
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

// Documents is where users can open the project's documents.
const Documents = "https://github.com/tessera-dra/tessera/blob/main/docs/user/"
