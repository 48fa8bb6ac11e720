package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

func getCommand(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get [NODE...]",
		Short: "List each device that a claim has, with its pods",
		Long: `List each device that a claim has, with its pods, and the GPUs that nobody has.
-o json and -o yaml print the whole model: nodes, GPUs, uses, and what else fits.`,
		Example: `  kubectl gpu get
  kubectl gpu get -n team -o wide
  kubectl gpu get -o json | jq '.nodes[].gpus[] | select(.uses == []) | .uuid'`,
		RunE: func(cmd *cobra.Command, nodes []string) error {
			if err := oneOf(o.output, "", "wide", "json", "yaml"); err != nil {
				return err
			}
			return get(cmd.Context(), o, nodes)
		},
	}
	o.addNamespaces(cmd)
	o.addOutput(cmd, "wide, json or yaml")
	return cmd
}

func get(ctx context.Context, o *options, nodes []string) error {
	lacks := missing{slicesName: noOffers, claimsName: noHolders, inventoriesName: noConditions, policiesName: noPolicies}
	if o.isDocument() {
		lacks = wholeModel()
	}
	r, c, err := o.state(ctx, lacks, nodes, o.namespace())
	if err != nil {
		return err
	}
	defer r.printNotes(o.ErrOut)
	if o.isDocument() {
		return write(o.Out, o.output, c)
	}
	if len(c.Nodes) == 0 {
		fmt.Fprintln(o.Out, nothingSeen)
		return nil
	}
	oneLines(&c)
	return table(o.Out, c, o.output == "wide")
}

// nothingSeen is printed instead of an empty table or map.
const nothingSeen = "No GPUs can be seen."

// state reads the model of the named nodes, or of all: only GPUs that the
// namespace uses if there is one. The reader has notes to tell.
func (o *options) state(ctx context.Context, lacks missing, nodes []string, namespace string) (*reader, view.Cluster, error) {
	r, err := o.reader(lacks)
	if err != nil {
		return nil, view.Cluster{}, err
	}
	c, err := r.model(ctx, o.currentNamespace(), o.output != "")
	if err != nil {
		return nil, c, err
	}
	if c, err = only(c, nodes, namespace); err != nil {
		r.printNotes(o.ErrOut)
	}
	return r, c, err
}

// nodeNames are the names of nodes with GPUs, for a shell to complete; none if they can't be
// read.
func (o *options) nodeNames(ctx context.Context) []string {
	r, err := o.reader(nil)
	if err != nil {
		return nil
	}
	all, err := r.inventories(ctx)
	if err != nil {
		return nil
	}
	var out []string
	for i := range all {
		out = append(out, all[i].Name)
	}
	return out
}

// currentNamespace is that of -n, or of the kubeconfig's context.
func (o *options) currentNamespace() string {
	namespace, _, err := o.flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return "default" // reading the kubeconfig has told the user of the error
	}
	return namespace
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

// write prints v as JSON or YAML.
func write(w io.Writer, form string, v any) error {
	raw, err := document(v, "  ")
	if err == nil && form == "yaml" {
		raw, err = yaml.JSONToYAML(raw)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", strings.ToUpper(form), err)
	}
	if t, ok := w.(terminal); ok {
		w = t.Writer // a document has the texts of nodes as they are
	}
	_, err = w.Write(raw)
	return err
}

// table prints a row for each use, and for each GPU without any.
func table(out io.Writer, c view.Cluster, wide bool) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	head := []string{"NODE", "GPU", "DEVICE", "KIND", "MEMORY", "NAMESPACE", "CLAIM", "PODS"}
	if wide {
		head = append(head, "MODEL", "UUID", "POLICY", "CONDITIONS")
	}
	row := func(cells []string) {
		for i := range cells {
			cells[i] = cmp.Or(cells[i], "-")
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	row(head)
	for _, n := range c.Nodes {
		for _, g := range n.GPUs {
			var more []string
			if wide {
				more = []string{g.Model, g.UUID, g.Policy, strings.Join(conditions(g), ",")}
			}
			for _, u := range g.Uses {
				row(append([]string{n.Name, fmt.Sprint(g.Index), u.Device, kind(u), memory(u.MemoryBytes), u.Claim.Namespace, u.Claim.Name, pods(u, wide)}, more...))
			}
			if len(g.Uses) == 0 {
				row(append([]string{n.Name, fmt.Sprint(g.Index), g.Device, "", memory(g.MemoryBytes), "", "", ""}, more...))
			}
		}
	}
	return w.Flush()
}

func conditions(g view.GPU) []string {
	var out []string
	for _, c := range g.Conditions {
		out = append(out, c.Type)
	}
	return out
}

// kind is how a row names a device: "mig 3g.40gb", "mps 1/4", "gpu (admin access)".
func kind(u view.Use) string {
	out := u.Type
	if u.Profile != "" {
		out += " " + u.Profile
	}
	if u.Count > 0 {
		out += fmt.Sprintf(" %d/%d", u.Number+1, u.Count)
	}
	if u.AdminAccess {
		out += " (admin access)"
	}
	if u.Leftover {
		out += " (no longer offered)"
	}
	return out
}

func memory(n int64) string {
	if n == 0 {
		return ""
	}
	return gibibytes(n)
}

// pods names the users of a claim, with the phases of pods in a wide table.
func pods(u view.Use, wide bool) string {
	out := u.Users()
	for i, p := range u.Pods {
		if wide && p.Phase != "" {
			out[i] = fmt.Sprintf("%s (%s)", p.Name, p.Phase)
		}
	}
	return strings.Join(out, ",")
}
