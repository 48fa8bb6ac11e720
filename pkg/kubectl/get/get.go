// Package get is kubectl gpu get: a row for each device that a claim has.
package get

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu get.
func Command(o *cluster.Options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get [NODE...]",
		Short: "List each device that a claim has, with its pods",
		Long: `List each device that a claim has, with its pods, and the GPUs that nobody has.
-o json and -o yaml print the whole model: nodes, GPUs, uses, and what else fits.`,
		Example: `  kubectl gpu get
  kubectl gpu get -n team -o wide
  kubectl gpu get -o json | jq '.nodes[].gpus[] | select(.uses == []) | .uuid'` + terminal.Shown(shown),
		RunE: func(cmd *cobra.Command, nodes []string) error {
			if err := cluster.OneOf(o.Output, "", "wide", "json", "yaml"); err != nil {
				return err
			}
			return get(cmd.Context(), o, nodes)
		},
	}
	o.AddNamespaces(cmd)
	o.AddOutput(cmd, "wide, json or yaml")
	return cmd
}

func get(ctx context.Context, o *cluster.Options, nodes []string) error {
	lacks := cluster.Missing{cluster.SlicesName: cluster.NoOffers, cluster.ClaimsName: cluster.NoHolders, cluster.InventoriesName: cluster.NoConditions, cluster.PoliciesName: cluster.NoPolicies}
	if o.Output == "wide" {
		lacks[cluster.NodesName] = cluster.NoRanks
	}
	return o.Show(ctx, lacks, nodes, func(c view.Cluster) error {
		if len(c.Nodes) == 0 {
			fmt.Fprintln(o.Out, terminal.NothingSeen)
			return nil
		}
		return table(o.Out, c, o.Output == "wide")
	})
}

// table prints a row for each use, and for each GPU without any.
func table(out io.Writer, c view.Cluster, wide bool) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	head := []string{"NODE", "GPU", "DEVICE", "KIND", "MEMORY", "NAMESPACE", "CLAIM", "PODS"}
	if wide {
		head = append(head, "MODEL", "UUID", "POLICY", "CONDITIONS", "RANK")
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
				more = []string{g.Model, g.UUID, g.Policy, strings.Join(conditions(g), ","), n.Rank}
			}
			for _, u := range g.Uses {
				row(append([]string{n.Name, fmt.Sprint(g.Index), u.Device, terminal.Kind(u), terminal.Memory(u.MemoryBytes), u.Claim.Namespace, u.Claim.Name, terminal.Pods(u, wide)}, more...))
			}
			if len(g.Uses) == 0 {
				row(append([]string{n.Name, fmt.Sprint(g.Index), g.Device, "", terminal.Memory(g.MemoryBytes), "", "", ""}, more...))
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
