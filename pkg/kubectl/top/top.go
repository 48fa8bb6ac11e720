// Package top is kubectl gpu top: memory and utilization by GPU, partition, share and pod.
package top

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// load is the measured use of a GPU, a partition or a share; nil: it wasn't measured.
type load struct {
	UsedBytes   *int64   `json:"usedBytes,omitempty"`
	Utilization *float64 `json:"utilization,omitempty"`
}

// topNode is the load of a node.
type topNode struct {
	Name string   `json:"name"`
	GPUs []topGPU `json:"gpus"`
}

type topGPU struct {
	Index       int    `json:"index"`
	UUID        string `json:"uuid"`
	Model       string `json:"model,omitempty"`
	MemoryBytes int64  `json:"memoryBytes,omitempty"`
	load

	Uses []topUse `json:"uses"`
}

// topUse is the load that one claim makes, or, on shares, one pod.
type topUse struct {
	view.Use
	load
}

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu top.
func Command(o *cluster.Options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "top [NODE...]",
		Short: "Show memory and utilization by GPU, partition, share and pod",
		Long: `Show how much memory of each GPU, MIG partition and share is used, out of how much,
and which fraction of the time it is busy, with the pods that have it.

It reads the metrics of each node's plugin through the API server's proxy, with your
rights: that takes the verb get on pods/proxy. Nothing is divided by guess: "-" stands
where nothing is measured, such as the utilization of MIG partitions on GPUs before
Hopper. Nodes that don't answer are named.

Of a GPU or partition that several pods have together, their use is one row; of shares,
each pod has a row.`,
		Example: `  kubectl gpu top
  kubectl gpu top node-3
  kubectl gpu top -n team
  kubectl gpu top -o json | jq '.[].gpus[] | select(.utilization < 0.1) | .uuid'` + terminal.Shown(shown),
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return o.NodeNames(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, nodes []string) error {
			if err := cluster.OneOf(o.Output, "", "json", "yaml"); err != nil {
				return err
			}
			return measureTop(cmd.Context(), o, nodes)
		},
	}
	o.AddNamespaces(cmd)
	o.AddOutput(cmd, "json or yaml")
	return cmd
}

func measureTop(ctx context.Context, o *cluster.Options, nodes []string) error {
	lacks := cluster.Missing{
		cluster.SlicesName: "the memory of partitions and shares isn't known", cluster.ClaimsName: "who has which device isn't known",
		cluster.InventoriesName: cluster.NoGPUs, cluster.PodsName: "nothing can be measured",
	}
	r, c, err := o.State(ctx, lacks, nodes, o.Namespace())
	if err != nil {
		return err
	}
	defer r.PrintNotes(o.ErrOut)
	measured, err := measure(ctx, r, c)
	if err != nil {
		return err
	}
	out := []topNode{}
	for _, n := range c.Nodes {
		out = append(out, loadOf(n, measured[n.Name], o.Namespace()))
	}
	if o.Output != "" {
		return terminal.Write(o.Out, o.Output, out)
	}
	if len(out) == 0 {
		fmt.Fprintln(o.Out, terminal.NothingSeen)
		return nil
	}
	terminal.OneLines(&out)
	return writeTop(o.Out, out)
}

// loadOf joins the model of a node with its metrics.
func loadOf(n view.Node, m metrics, namespace string) topNode {
	out := topNode{Name: n.Name, GPUs: []topGPU{}}
	for _, g := range n.GPUs {
		t := topGPU{Index: g.Index, UUID: g.UUID, Model: g.Model, MemoryBytes: g.MemoryBytes, load: m.measured("tessera_gpu", having{"uuid": g.UUID}), Uses: []topUse{}}
		for _, u := range g.Uses {
			if namespace == "" || u.Claim.Namespace == namespace {
				t.Uses = append(t.Uses, usesOf(u, t.load, m)...)
			}
		}
		out.GPUs = append(out.GPUs, t)
	}
	return out
}

// usesOf is the load of one use: a row for each pod where the pods are measured each.
func usesOf(u view.Use, whole load, m metrics) []topUse {
	of := having{"device": u.Device, "share_id": u.ShareID, "namespace": u.Claim.Namespace, "claim": u.Claim.Name}
	switch {
	case u.Type == gpu.TypeGPU:
		return []topUse{{u, whole}}
	case u.Type == gpu.TypeMIG:
		uuid := m.label("tessera_allocation_info", of, "uuid")
		if uuid == "" {
			return []topUse{{u, load{}}}
		}
		return []topUse{{u, m.measured("tessera_partition", having{"uuid": uuid})}}
	case len(u.Pods) < 2:
		return []topUse{{u, m.measured("tessera_share", of)}}
	}
	var out []topUse
	for _, p := range u.Pods {
		one := u
		one.Pods = []view.Pod{p}
		of["pod"] = p.Name
		out = append(out, topUse{one, m.measured("tessera_share", of)})
	}
	return out
}

func writeTop(out io.Writer, nodes []topNode) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(cells ...string) {
		for i := range cells {
			cells[i] = cmp.Or(cells[i], "-")
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	row("NODE", "GPU", "DEVICE", "USED", "OF", "BUSY", "NAMESPACE", "CLAIM", "PODS")
	for _, n := range nodes {
		for _, g := range n.GPUs {
			index := fmt.Sprint(g.Index)
			row(n.Name, index, cmp.Or(g.Model, "GPU"), g.used(), terminal.Memory(g.MemoryBytes), g.busy(), "", "", "")
			for _, u := range g.Uses {
				row(n.Name, index, "  "+terminal.Kind(u.Use), u.used(), terminal.Memory(u.MemoryBytes), u.busy(), u.Claim.Namespace, u.Claim.Name, terminal.Pods(u.Use, false))
			}
		}
	}
	return w.Flush()
}

// used is the memory for people; empty: it wasn't measured.
func (l load) used() string {
	if l.UsedBytes == nil {
		return ""
	}
	if n := *l.UsedBytes; n < 1<<30 {
		return fmt.Sprintf("%dMi", n>>20)
	}
	return terminal.Gibibytes(*l.UsedBytes)
}

func (l load) busy() string {
	if l.Utilization == nil {
		return ""
	}
	return fmt.Sprintf("%.0f%%", *l.Utilization*100)
}
