// Package gpumap is kubectl gpu map: a drawing of each GPU with its memory slots. A package
// can't have the name map.
package gpumap

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu map.
func Command(o *cluster.Options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "map [NODE...]",
		Short: "Draw each GPU with its memory slots, the pods in them, and what else fits",
		Long: `Draw a row for each GPU: its memory from left to right, with the pods that have
it, and how many more claims of each kind the scheduler would find room for.

  [train    ]  a whole GPU, a MIG partition at its place, or a share, and its pod;
               (name) is a claim that no pod uses, +2 that two more share the place
  ..........   free memory
  ??????????   memory of which it isn't known who has it, if anybody
  xxxxxxxxxx   a MIG instance that others than Tessera made

Conditions and taints of a GPU are below its row. A node's rank, or that it is in the
reserve, is beside its name: the scheduler prefers nodes with a lower one, or none.`,
		Example: `  kubectl gpu map
  kubectl gpu map node-3           # only this node
  kubectl gpu map -n team          # only GPUs that the namespace's pods use
  kubectl gpu map -o json          # the model that the map is drawn from` + terminal.Shown(shown),
		RunE: func(cmd *cobra.Command, nodes []string) error {
			if err := cluster.OneOf(o.Output, "", "json", "yaml"); err != nil {
				return err
			}
			return drawMap(cmd.Context(), o, nodes)
		},
	}
	o.AddNamespaces(cmd)
	o.AddOutput(cmd, "json or yaml; default: a drawing")
	return cmd
}

func drawMap(ctx context.Context, o *cluster.Options, nodes []string) error {
	lacks := cluster.Missing{cluster.SlicesName: cluster.NoOffers, cluster.ClaimsName: cluster.NoHolders, cluster.RulesName: cluster.NoRules, cluster.InventoriesName: cluster.NoConditions, cluster.NodesName: cluster.NoRanks}
	return o.Show(ctx, lacks, nodes, func(c view.Cluster) error {
		drawing{w: o.Out, Screen: o.Screen}.cluster(c)
		return nil
	})
}

// drawing draws a map.
type drawing struct {
	w io.Writer
	terminal.Screen
}

func (d drawing) cluster(c view.Cluster) {
	if len(c.Nodes) == 0 {
		fmt.Fprintln(d.w, terminal.NothingSeen)
	}
	for i, n := range c.Nodes {
		if i > 0 {
			fmt.Fprintln(d.w)
		}
		d.node(n)
	}
}

func (d drawing) node(n view.Node) {
	title := n.Name
	if n.DriverVersion != "" {
		title += ", driver " + n.DriverVersion
	}
	if n.Rank != "" {
		title += ", " + n.Rank
	}
	fmt.Fprintln(d.w, d.Bold(title))
	for _, p := range n.Problems {
		fmt.Fprintln(d.w, "  "+d.Red("! "+p))
	}
	for rest := n.GPUs; len(rest) > 0; {
		same := slices.IndexFunc(rest, func(g view.GPU) bool { return g.Model != rest[0].Model })
		if same < 0 {
			same = len(rest)
		}
		fmt.Fprintf(d.w, "  %d× %s\n", same, cmp.Or(rest[0].Model, "unknown model"))
		for _, g := range rest[:same] {
			d.gpu(g)
		}
		rest = rest[same:]
	}
}

// gpu draws one GPU: its index, the bar, the devices that still fit, and its problems.
func (d drawing) gpu(g view.GPU) {
	index := "?"
	if g.Index >= 0 {
		index = fmt.Sprint(g.Index)
	}
	width := max(24, min(96, d.Width*2/5)/8*8)
	line := fmt.Sprintf("%4s %s  ", index, bar(g, width))
	room := max(20, d.Width-utf8.RuneCountInString(line))
	if len(g.Uses) > 0 {
		line = d.Green(line)
	}
	fmt.Fprintln(d.w, line+fits(g, room))
	told := make(map[string]bool)
	for _, c := range g.Conditions {
		text := "! " + c.Type
		if c.Message != "" {
			text += ": " + c.Message
		}
		told[c.Type] = true
		fmt.Fprintln(d.w, "     "+d.Red(text))
	}
	for _, t := range g.Taints {
		if !told[t.Value] {
			fmt.Fprintln(d.w, "     "+d.Red(fmt.Sprintf("! taint %s:%s", strings.TrimSuffix(t.Key+"="+t.Value, "="), t.Effect)))
		}
	}
}

// bar draws the memory of a GPU.
func bar(g view.GPU, width int) string {
	empty := "."
	switch {
	case !g.Offered:
		empty = " "
	case g.Fits == nil:
		empty = "?"
	}
	out := []rune(strings.Repeat(empty, width))
	for _, x := range g.Instances {
		all := max(1, g.MemorySlices)
		from, to := x.Placement.Start*width/all, (x.Placement.Start+x.Placement.Size)*width/all
		for i := from; i < min(to, width); i++ {
			out[i] = 'x'
		}
	}
	for _, s := range segments(g, width) {
		copy(out[s.from:], []rune(box(s.labels, s.to-s.from)))
	}
	return string(out)
}

// segment is a part of the bar, with the names of those who have it.
type segment struct {
	from, to int
	labels   []string
}

// segments are those of the model, in characters. Several uses can have one: shares that
// are narrower than a character, for example.
func segments(g view.GPU, width int) []segment {
	page := view.Page(view.Node{GPUs: []view.GPU{g}}, "").GPUs[0]
	var out []segment
	at := func(fraction float64) int { return int(fraction*float64(width) + 1e-6) } // fractions are rounded
	for _, s := range page.Segments {
		from := min(at(s.Start), width-1)
		to := min(max(at(s.Start+s.Size), from+1), width)
		var labels []string
		for _, i := range s.Uses {
			labels = append(labels, label(g.Uses[i]))
		}
		if k := slices.IndexFunc(out, func(o segment) bool { return o.from == from && o.to == to }); k >= 0 {
			out[k].labels = append(out[k].labels, labels...)
			continue
		}
		out = append(out, segment{from, to, labels})
	}
	return out
}

// label names a use: its pod or PodGroup, or its claim in parentheses.
func label(u view.Use) string {
	switch users := u.Users(); len(users) {
	case 0:
		return "(" + u.Claim.Name + ")"
	case 1:
		return users[0]
	default:
		return fmt.Sprintf("%s+%d", users[0], len(users)-1)
	}
}

// box draws a segment of the width.
func box(labels []string, width int) string {
	text := labels[0]
	if len(labels) > 1 {
		text = fmt.Sprintf("%s+%d", text, len(labels)-1)
	}
	if width < 3 {
		return strings.Repeat("#", width)
	}
	return "[" + pad(text, width-2) + "]"
}

// pad makes text exactly as long as the width; it cuts the middle, because both ends
// of a pod's name distinguish it.
func pad(text string, width int) string {
	r := []rune(text)
	if len(r) > width {
		if width < 5 {
			return string(r[:width])
		}
		end := (width - 1) / 2
		return string(r[:width-1-end]) + "~" + string(r[len(r)-end:])
	}
	return text + strings.Repeat(" ", width-len(r))
}

// fits lists what else fits, as far as there is room.
func fits(g view.GPU, width int) string {
	if !g.Offered {
		return "not offered"
	}
	var parts []string
	for _, f := range g.Fits {
		if f.Count > 0 {
			parts = append(parts, more(f))
		}
	}
	switch {
	case g.Fits == nil:
		return "?"
	case len(parts) == 0 && slices.ContainsFunc(g.Taints, func(t view.Taint) bool { return t.Effect != "None" }):
		return "blocked"
	case len(parts) == 0:
		return "full"
	}
	for n := len(parts); n > 0; n-- {
		text := strings.Join(parts[:n], " ")
		if n < len(parts) {
			text += fmt.Sprintf(" +%d", len(parts)-n)
		}
		if utf8.RuneCountInString(text) <= width {
			return text
		}
	}
	return fmt.Sprintf("+%d", len(parts))
}

// more writes how many of a kind fit: "whole", "7×1g.10gb", "2×mps 20Gi".
func more(f view.Fit) string {
	name := f.Profile
	switch {
	case f.MaxMemoryBytes > 0:
		return fmt.Sprintf("%d×mps ≤%s", f.Count, terminal.Gibibytes(f.MaxMemoryBytes))
	case f.Type == gpu.TypeGPU:
		return "whole"
	case f.Type == gpu.TypeMPS && name != "":
		name = "mps/" + name
	case f.Type == gpu.TypeMPS:
		name = "mps " + terminal.Gibibytes(f.MemoryBytes)
	case name == "":
		name = f.Type
	}
	return fmt.Sprintf("%d×%s", f.Count, name)
}
