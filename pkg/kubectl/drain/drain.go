// Package drain is kubectl gpu drain: it keeps new claims off a GPU, and evicts the pods
// that use it.
package drain

import (
	"bufio"
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu drain.
func Command(o *cluster.Options) *cobra.Command {
	var how drainFlags
	cmd := &cobra.Command{
		Use:   "drain NODE/GPU | NODE",
		Short: "Keep new claims off a GPU, and evict the pods that use it",
		Long: `Keep new claims off a GPU, or off all GPUs of a node, and evict the pods that use it,
by DeviceTaintRules: one for the node, or one for each device of the GPU, because a rule
can't select a GPU with its partitions and shares. GPU is an index, a UUID or the name of
its device.

The command lists the pods that would be evicted, and asks. Only after a yes it makes the
rules, with the effect NoExecute; after anything else, Ctrl-C too, nothing has changed.
Pods whose claims tolerate the taint ` + drainKey + ` for ever stay. Devices that a
SharingPolicy brings later have no rule: drain again.

--dry-run prints the rules and the pods, and changes nothing. The rules are printed with
the effect None, with which they would change nothing either, except for Kubernetes 1.34
and older, which don't have it. --undo deletes the rules.

It takes the verbs create, update, list and delete on devicetaintrules. Kubernetes 1.37
has them; older versions need a feature gate, DRADeviceTaintRules from 1.35 on and before
that DRADeviceTaints.`,
		Example: `  kubectl gpu drain node-3/0 --dry-run
  kubectl gpu drain node-3/0
  kubectl gpu drain node-3 --yes
  kubectl gpu drain node-3/0 --undo` + terminal.Shown(shown),
		Args: cluster.Exactly("NODE/GPU or NODE"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return gpuNames(cmd.Context(), o), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return drain(cmd.Context(), o, args[0], how)
		},
	}
	cmd.Flags().BoolVar(&how.dryRun, "dry-run", false, "print the rules and the pods that would be evicted")
	cmd.Flags().BoolVar(&how.undo, "undo", false, "delete the rules that drain has made")
	cmd.Flags().BoolVarP(&how.yes, "yes", "y", false, "don't ask")
	o.AddOutput(cmd, "json or yaml, of --dry-run; default: the rules, with the pods as comments")
	return cmd
}

type drainFlags struct{ dryRun, undo, yes bool }

// checkDrain returns an error for flags that don't go together.
func checkDrain(o *cluster.Options, how drainFlags) error {
	switch {
	case how.dryRun && (how.undo || how.yes), how.undo && how.yes:
		return errors.New("--dry-run, --undo and --yes exclude each other")
	case o.Output != "" && !how.dryRun:
		return errors.New("-o is for --dry-run")
	case how == (drainFlags{}) && !isTerminal(o.In):
		return errors.New("standard input is no terminal, so nobody can be asked: --dry-run shows what would be done, --yes does it")
	}
	return cluster.OneOf(o.Output, "", "json", "yaml")
}

func drain(ctx context.Context, o *cluster.Options, target string, how drainFlags) error {
	if err := checkDrain(o, how); err != nil {
		return err
	}
	d, err := newDrainer(ctx, o, target)
	if d != nil {
		defer d.PrintNotes(o.ErrOut)
	}
	switch {
	case err != nil:
		return err
	case how.undo:
		return d.undo(ctx)
	}
	if how.dryRun {
		return d.show()
	}
	return d.run(ctx, how.yes)
}

// drainKey is the key of the taint, and of a label of the rules.
const drainKey = "gpu.tessera.dev/drain"

func isTerminal(in io.Reader) bool {
	f, ok := in.(interface{ Fd() uintptr })
	return ok && term.IsTerminal(int(f.Fd()))
}

// gpuNames are the arguments for a shell to complete.
func gpuNames(ctx context.Context, o *cluster.Options) []string {
	r, err := o.Reader(nil)
	if err != nil {
		return nil
	}
	c, err := r.Model(ctx, o.CurrentNamespace(), false)
	if err != nil {
		return nil
	}
	var out []string
	for _, n := range c.Nodes {
		out = append(out, n.Name)
		for _, g := range n.GPUs {
			if g.Device == "" {
				continue // it can't be drained
			}
			name := strconv.Itoa(g.Index)
			if len(named(n.GPUs, name)) != 1 {
				name = g.Device
			}
			out = append(out, n.Name+"/"+name)
		}
	}
	return out
}

// drainer drains a GPU, or a node.
type drainer struct {
	*cluster.Reader
	options *cluster.Options
	in      *bufio.Reader

	target  string
	node    string
	gpu     *view.GPU // nil: all of the node
	objects view.Objects
}

// eviction is a pod that is evicted, or would be, or all pods of a PodGroup of which none
// is known.
type eviction struct {
	Pod      string `json:"pod,omitempty"`
	PodGroup string `json:"podGroup,omitempty"`
	Claim    string `json:"claim"`
	Device   string `json:"device"`
}

// String names the pods in one line.
func (e eviction) String() string {
	of := fmt.Sprintf("(claim %s, %s)", e.Claim, e.Device)
	switch {
	case e.Pod == "":
		return fmt.Sprintf("the pods of PodGroup %s %s", e.PodGroup, of)
	case e.PodGroup != "":
		return fmt.Sprintf("%s of PodGroup %s %s", e.Pod, e.PodGroup, of)
	}
	return e.Pod + " " + of
}

// same reports whether both are the same pods.
func (e eviction) same(f eviction) bool {
	return e.Pod == f.Pod && (e.Pod != "" || e.PodGroup == f.PodGroup)
}

func newDrainer(ctx context.Context, o *cluster.Options, target string) (*drainer, error) {
	r, err := o.Reader(cluster.Missing{cluster.ClaimsName: "which pods would be evicted isn't known", cluster.InventoriesName: cluster.NoGPUs})
	if err != nil {
		return nil, err
	}
	d := &drainer{Reader: r, options: o, target: target, in: bufio.NewReader(o.In)}
	return d, d.read(ctx)
}

// read reads the cluster, and finds the target.
func (d *drainer) read(ctx context.Context) (err error) {
	d.Forget()
	d.gpu = nil
	if d.objects, err = d.Objects(ctx, d.options.CurrentNamespace()); err != nil {
		return err
	}
	if d.objects.Pods, err = d.GroupPods(ctx, d.objects.Claims); err != nil {
		return err
	}
	if err := d.checkRules(ctx); err != nil {
		return err
	}
	if err := d.RequireRead("which devices there are to drain", cluster.SlicesName); err != nil {
		return err
	}
	return d.find(view.Build(d.objects))
}

// find looks up the node and the GPU.
func (d *drainer) find(c view.Cluster) error {
	node, name, one := strings.Cut(d.target, "/")
	i := slices.IndexFunc(c.Nodes, func(n view.Node) bool { return n.Name == node })
	if i < 0 {
		return fmt.Errorf("there is no node %s with GPUs; kubectl gpu map shows all", node)
	}
	d.node = node
	if !one {
		return nil
	}
	gpus := c.Nodes[i].GPUs
	switch found := named(gpus, name); len(found) {
	case 0:
		return fmt.Errorf("node %s has no GPU %s; kubectl gpu map %s shows its GPUs", node, name, node)
	case 1:
		if found[0].Device == "" { // a rule without a device is for the whole node
			return fmt.Errorf("GPU %s of node %s can't be drained: no device can be named after its UUID, %s, so no claim gets it",
				name, node, cmp.Or(found[0].UUID, "which is unknown"))
		}
		d.gpu = found[0]
		return nil
	default:
		var which []string
		for _, g := range found {
			which = append(which, fmt.Sprintf("%s/%s (%s)", node, cmp.Or(g.Device, g.UUID), cmp.Or(g.UUID, "UUID unknown")))
		}
		return fmt.Errorf("node %s has %d GPUs with index %s: name one by its device or UUID: %s",
			node, len(found), name, strings.Join(which, ", "))
	}
}

// named returns the GPUs that a name identifies: an index, a UUID or a device. A lost GPU
// keeps its index, which another one may have since; an unknown index identifies none.
func named(gpus []view.GPU, name string) []*view.GPU {
	var out []*view.GPU
	for i := range gpus {
		g := &gpus[i]
		if name != "" && (g.Index >= 0 && name == strconv.Itoa(g.Index) || name == g.UUID || name == g.Device) {
			out = append(out, g)
		}
	}
	return out
}

// concerns reports whether a device of the node is to be drained.
func (d *drainer) concerns(device string) bool {
	return d.gpu == nil || string(gpu.DeviceName(device).Whole()) == d.gpu.Device
}

// evictions are the pods that NoExecute evicts, and those whose claims tolerate it.
func (d *drainer) evictions() (gone, stay []eviction) {
	taint := resourceapi.DeviceTaint{Key: drainKey, Effect: resourceapi.DeviceTaintEffectNoExecute}
	gone, stay = []eviction{}, []eviction{}
	groups := fit.GroupsOf(d.objects.Pods)
	for i := range d.objects.Claims {
		c := &d.objects.Claims[i]
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if r.Driver != gpu.DriverName || r.Pool != d.node || !d.concerns(r.Device) {
				continue
			}
			into := &gone
			if toleratesForEver(r.Tolerations, taint) {
				into = &stay
			}
			for _, user := range groups.UsersOf(c) {
				if e := evictionOf(user, c, r.Device); !slices.ContainsFunc(*into, e.same) {
					*into = append(*into, e)
				}
			}
		}
	}
	// A pod with one claim that tolerates the taint and one that doesn't goes.
	stay = slices.DeleteFunc(stay, func(s eviction) bool {
		return slices.ContainsFunc(gone, s.same)
	})
	return gone, stay
}

func evictionOf(user fit.User, c *resourceapi.ResourceClaim, device string) eviction {
	out := eviction{Claim: c.Name, Device: device}
	if user.Pod != "" {
		out.Pod = c.Namespace + "/" + user.Pod
	}
	if user.Group != "" {
		out.PodGroup = c.Namespace + "/" + user.Group
	}
	return out
}

// toleratesForEver reports whether pods with such tolerations stay.
func toleratesForEver(all []resourceapi.DeviceToleration, taint resourceapi.DeviceTaint) bool {
	return slices.ContainsFunc(all, func(t resourceapi.DeviceToleration) bool {
		return t.TolerationSeconds == nil && resourceclaim.ToleratesTaint(t, taint)
	})
}

// list prints the pods that go and stay.
func (d *drainer) list(prefix string, gone, stay []eviction) {
	unsure := ""
	if d.objects.SomeClaims {
		unsure = " of the claims that you may list"
	}
	if len(gone) == 0 {
		fmt.Fprintf(d.options.Out, "%sNo pod%s would be evicted.\n", prefix, unsure)
	} else {
		fmt.Fprintf(d.options.Out, "%sPods%s that would be evicted with the effect NoExecute:\n", prefix, unsure)
	}
	for _, e := range gone {
		fmt.Fprintf(d.options.Out, "%s  %s\n", prefix, e)
	}
	for _, e := range stay {
		fmt.Fprintf(d.options.Out, "%sStays, because its claim tolerates the taint: %s\n", prefix, e)
	}
}
