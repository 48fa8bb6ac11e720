// Package slots is kubectl gpu slots: who gets which slot of a GPU, and who leaves it.
package slots

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu slots.
func Command(o *cluster.Options) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "slots [NODE...]",
		Short: "List the slots of each GPU, and who comes and goes",
		Long: `List the slots of each GPU: the ranges of its memory that claims have, that are free,
and that nobody gets. With --watch it goes on until it is interrupted, and prints a
line for each claim that gets a slot, leaves it, or has other pods than before. It
watches with your own rights, as kubectl gpu web does.

SLOTS are memory slices as MIG counts them; shares have a size and no such place.

  LISTED     the slot was there when the command started
  ADDED      a claim got it
  MODIFIED   its claim has other pods, or it isn't offered any more
  DELETED    its claim has gone

With -o json and --watch each line is a JSON document, with the fields event and slot.`,
		Example: `  kubectl gpu slots node-3
  kubectl gpu slots --watch
  kubectl gpu slots -n team -w
  kubectl gpu slots -w -o json | jq -r 'select(.event == "DELETED") | .slot.use.device'` + terminal.Shown(shown),
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return o.NodeNames(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, nodes []string) error {
			if !follow {
				return listSlots(cmd.Context(), o, nodes)
			}
			if err := cluster.OneOf(o.Output, "", "json"); err != nil {
				return err
			}
			return watchSlots(cmd.Context(), o, nodes)
		},
	}
	cmd.Flags().BoolVarP(&follow, "watch", "w", false, "go on, and print changes as they happen")
	o.AddNamespaces(cmd)
	o.AddOutput(cmd, "json, or yaml without --watch")
	return cmd
}

// slotParts are the parts of the output that are missing without a resource.
func slotParts() cluster.Missing {
	return cluster.Missing{
		cluster.SlicesName: cluster.NoOffers, cluster.ClaimsName: cluster.NoHolders, cluster.RulesName: cluster.NoRules, cluster.InventoriesName: "MIG instances that others made aren't shown",
	}
}

// listSlots prints the slots once.
func listSlots(ctx context.Context, o *cluster.Options, nodes []string) error {
	if err := cluster.OneOf(o.Output, "", "json", "yaml"); err != nil {
		return err
	}
	r, c, err := o.State(ctx, slotParts(), nodes, "")
	if err != nil {
		return err
	}
	defer r.PrintNotes(o.ErrOut)
	out := []view.Slot{}
	for _, n := range c.Nodes {
		page := view.Page(n, "")
		out = append(out, wanted(o, page.Slots())...)
	}
	switch {
	case o.Output != "":
		return terminal.Write(o.Out, o.Output, out)
	case len(out) == 0:
		fmt.Fprintln(o.Out, terminal.NothingSeen)
		return nil
	}
	terminal.OneLines(&out)
	w := tabwriter.NewWriter(o.Out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join(slotColumns(), "\t"))
	for i := range out {
		fmt.Fprintln(w, strings.Join(slotCells(&out[i]), "\t"))
	}
	return w.Flush()
}

// wanted leaves out the slots of other namespaces than that of -n, and then also the
// free ones.
func wanted(o *cluster.Options, all []view.Slot) []view.Slot {
	namespace := o.Namespace()
	return slices.DeleteFunc(all, func(s view.Slot) bool {
		return namespace != "" && (s.Use == nil || s.Use.Claim.Namespace != namespace)
	})
}

func slotColumns() []string {
	return []string{"NODE", "GPU", "SLOTS", "KIND", "MEMORY", "NAMESPACE", "CLAIM", "PODS"}
}

func slotCells(s *view.Slot) []string {
	out := []string{s.Node, fmt.Sprint(s.GPU), places(s.Placement), string(s.State), terminal.Memory(s.MemoryBytes), "", "", ""}
	switch {
	case s.Use != nil:
		out[3], out[5], out[6], out[7] = terminal.Kind(*s.Use), s.Use.Claim.Namespace, s.Use.Claim.Name, terminal.Pods(*s.Use, false)
	case s.Instance != nil:
		out[3] = fmt.Sprintf("mig %s (made by others)", s.Instance.Profile)
	}
	for i := range out {
		out[i] = cmp.Or(out[i], "-")
	}
	return out
}

// places writes a range of memory slices: "0-3", "4".
func places(p *view.Placement) string {
	switch {
	case p == nil:
		return ""
	case p.Size == 1:
		return fmt.Sprint(p.Start)
	}
	return fmt.Sprintf("%d-%d", p.Start, p.Start+p.Size-1)
}

// slotEvent is a line of --watch -o json.
type slotEvent struct {
	Event string    `json:"event"`
	Slot  view.Slot `json:"slot"`
}

// Events of slots.
const (
	slotListed   = "LISTED"
	slotAdded    = "ADDED"
	slotModified = "MODIFIED"
	slotDeleted  = "DELETED"
)

func watchSlots(ctx context.Context, o *cluster.Options, nodes []string) error {
	r, err := o.Reader(slotParts())
	if err != nil {
		return err
	}
	all := r.Resources()
	source, err := feed.NewSource(feed.Resources{Slices: all.Slices, Claims: all.Claims, Inventories: all.Inventories, TaintRules: all.TaintRules}, feed.SourceOptions{Namespace: o.CurrentNamespace()})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() { defer close(ended); source.Run(ctx) }()
	defer func() { stop(); <-ended }()
	return follow(ctx, o, source, nodes)
}

// follow prints the slots of the source and their changes until the context ends.
func follow(ctx context.Context, o *cluster.Options, source *feed.Source, nodes []string) error {
	w := slotWatch{Options: o, nodes: nodes, known: make(map[string][]view.Slot)}
	err := source.Follow(ctx, w.update)
	if errors.Is(err, context.Canceled) {
		return nil // the user's way to end it
	}
	return err
}

// slotWatch prints changes of slots.
type slotWatch struct {
	*cluster.Options

	nodes []string
	// known are the slots by node; they are printed once all can be known.
	known  map[string][]view.Slot
	listed bool
	notes  cluster.NotePrinter
	// widths of the columns so far.
	widths []int
}

func (w *slotWatch) update(u feed.Update) error {
	if u.Cluster != nil {
		w.notes.Print(w.ErrOut, u.Cluster.Notes)
	}
	var events []slotEvent
	for i := range u.Nodes {
		n := &u.Nodes[i]
		if len(w.nodes) > 0 && !slices.Contains(w.nodes, n.Name) {
			continue
		}
		now := wanted(w.Options, n.Slots())
		events = append(events, slotChanges(w.known[n.Name], now)...)
		w.known[n.Name] = now
	}
	for _, name := range u.Gone {
		events = append(events, slotChanges(w.known[name], nil)...)
		delete(w.known, name)
	}
	if u.All {
		w.listed = true
		return w.list()
	}
	if !w.listed {
		return nil
	}
	return w.print(events)
}

// list prints all slots.
func (w *slotWatch) list() error {
	for _, name := range w.nodes {
		if _, ok := w.known[name]; !ok {
			return fmt.Errorf("there is no node %s with GPUs; kubectl gpu map shows all", name)
		}
	}
	var events []slotEvent
	for _, name := range slices.Sorted(maps.Keys(w.known)) {
		for _, s := range w.known[name] {
			events = append(events, slotEvent{slotListed, s})
		}
	}
	if w.Output == "" {
		if err := w.row(append([]string{"EVENT"}, slotColumns()...), events); err != nil {
			return err
		}
	}
	return w.print(events)
}

// slotChanges are those of the slots that claims have.
func slotChanges(before, after []view.Slot) []slotEvent {
	var out []slotEvent
	was, is := usedSlots(before), usedSlots(after)
	for i := range before {
		if s := before[i]; s.Use != nil && is[slotKeyOf(&s)] == nil {
			out = append(out, slotEvent{slotDeleted, s})
		}
	}
	for i := range after {
		s := after[i]
		if s.Use == nil {
			continue
		}
		switch old := was[slotKeyOf(&s)]; {
		case old == nil:
			out = append(out, slotEvent{slotAdded, s})
		case terminal.Pods(*old, false) != terminal.Pods(*s.Use, false) || old.Leftover != s.Use.Leftover:
			out = append(out, slotEvent{slotModified, s})
		}
	}
	return out
}

// slotKey identifies a slot that a claim has.
type slotKey struct {
	gpu, device, share string
	claim              view.Claim
}

func slotKeyOf(s *view.Slot) slotKey {
	return slotKey{s.UUID, s.Use.Device, s.Use.ShareID, s.Use.Claim}
}

func usedSlots(all []view.Slot) map[slotKey]*view.Use {
	out := make(map[slotKey]*view.Use)
	for i := range all {
		if s := &all[i]; s.Use != nil {
			out[slotKeyOf(s)] = s.Use
		}
	}
	return out
}

func (w *slotWatch) print(events []slotEvent) error {
	for _, e := range events {
		var err error
		if w.Output == "json" {
			err = w.document(e)
		} else {
			cells := append([]string{e.Event}, slotCells(&e.Slot)...)
			terminal.OneLines(&cells)
			err = w.row(cells, nil)
		}
		if err != nil {
			return fmt.Errorf("print a slot: %w", err)
		}
	}
	return nil
}

// document prints an event as a line of JSON.
func (w *slotWatch) document(e slotEvent) error {
	raw, err := terminal.Document(e, "")
	if err != nil {
		return err
	}
	_, err = w.Out.Write(raw)
	return err
}

// row prints a row as wide as the events to come need it. A column grows if a later cell
// is wider.
func (w *slotWatch) row(cells []string, toCome []slotEvent) error {
	if w.widths == nil {
		w.widths = make([]int, len(cells))
		w.widths[0] = len(slotModified)
	}
	fit := func(cells []string) {
		for i, c := range cells {
			w.widths[i] = max(w.widths[i], len(c))
		}
	}
	fit(cells)
	for i := range toCome {
		fit(append([]string{toCome[i].Event}, slotCells(&toCome[i].Slot)...))
	}
	var line strings.Builder
	for i, c := range cells[:len(cells)-1] {
		fmt.Fprintf(&line, "%-*s  ", w.widths[i], c)
	}
	_, err := io.WriteString(w.Out, line.String()+cells[len(cells)-1]+"\n")
	return err
}
