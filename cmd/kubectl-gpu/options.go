package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
)

// options are those of all subcommands.
type options struct {
	genericclioptions.IOStreams

	flags  *genericclioptions.ConfigFlags
	screen screen
	all    bool
	output string
}

// newOptions makes the options of commands that print to a screen.
func newOptions(streams genericclioptions.IOStreams, s screen) *options {
	streams.Out, streams.ErrOut = terminal{streams.Out, s.colour}, terminal{Writer: streams.ErrOut}
	return &options{IOStreams: streams, flags: genericclioptions.NewConfigFlags(true), screen: s}
}

// addNamespaces adds -A.
func (o *options) addNamespaces(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&o.all, "all-namespaces", "A", false, "all namespaces, also if -n is given")
}

// addOutput adds -o.
func (o *options) addOutput(cmd *cobra.Command, forms string) {
	cmd.Flags().StringVarP(&o.output, "output", "o", "", "output format: "+forms)
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

// Answers, not failures: they make the exit statuses 1 and 3.
var (
	errNo       = errors.New("no")
	errWarnings = errors.New("warnings")
)

// currentNamespace is that of -n, or of the kubeconfig's context.
func (o *options) currentNamespace() string {
	namespace, _, err := o.flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return "default" // reading the kubeconfig has told the user of the error
	}
	return namespace
}

// clusterName returns the name of the kubeconfig's context in use; empty if there is none.
func (o *options) clusterName() string {
	raw, err := o.flags.ToRawKubeConfigLoader().RawConfig()
	if err != nil {
		return "" // reading the kubeconfig has told the user of the error
	}
	if c := o.flags.Context; c != nil && *c != "" {
		return *c
	}
	return raw.CurrentContext
}

func oneOf(output string, forms ...string) error {
	if slices.Contains(forms, output) {
		return nil
	}
	return fmt.Errorf("-o %s: want one of %s", output, strings.TrimPrefix(strings.Join(forms, ", "), ", "))
}

// exactly wants one argument, which the text describes.
func exactly(text string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("%s wants %s; kubectl gpu %s --help has examples", cmd.Name(), text, cmd.Name())
		}
		return nil
	}
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

// documents is where users can open the project's documents.
const documents = "https://github.com/tessera-dra/tessera/blob/main/docs/"
