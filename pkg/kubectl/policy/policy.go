// Package policy is kubectl gpu policy: what a SharingPolicy does, or would do.
package policy

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/forecast"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// policyView is a SharingPolicy with the uses of its GPUs.
type policyView struct {
	Name   string                       `json:"name"`
	Plan   string                       `json:"plan"`
	Spec   v1alpha1.SharingPolicySpec   `json:"spec"`
	Status v1alpha1.SharingPolicyStatus `json:"status"`
	// Devices by kind, of the GPUs that the status lists.
	Devices []deviceUse `json:"devices"`
}

// deviceUse is a kind of device.
type deviceUse struct {
	Kind string `json:"kind"`
	// InUse: so many claims have such a device.
	InUse int `json:"inUse"`
	// Free: so many more claims fit, on each GPU counted alone; absent where not all
	// claims can be listed.
	Free *int `json:"free,omitempty"`
}

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu policy.
func Command(o *cluster.Options) *cobra.Command {
	var dryRun bool
	var file string
	cmd := &cobra.Command{
		Use:   "policy [NAME | --dry-run -f FILE]",
		Short: "Show what a SharingPolicy does, or would do",
		Long: `List the SharingPolicies, or show one: its plan, its nodes and GPUs, which devices
claims have of them and what else fits, which devices wait for their claims, which
other policies take precedence, and what can't be carried out.

With --dry-run, say what the SharingPolicy in a file would do if it were applied now:
which GPUs it would have, which devices would come and go, which claims would keep
devices that nobody else gets, and what can't be carried out. The decisions are the
controller's own, made from the GPUInventories and claims of this moment. The API server
is asked for its checks of the file by a dry run; nothing is stored. Unknown fields are
errors.`,
		Example: `  kubectl gpu policy
  kubectl gpu policy shares
  kubectl gpu policy --dry-run -f policy.yaml && kubectl apply -f policy.yaml` + terminal.Shown(shown),
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return o.PolicyNames(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cluster.OneOf(o.Output, "", "json", "yaml"); err != nil {
				return err
			}
			switch {
			case dryRun != (file != ""):
				return errors.New("--dry-run and -f FILE go together: the file has the SharingPolicy")
			case dryRun && len(args) > 0:
				return errors.New("give a name, or --dry-run -f FILE")
			case dryRun:
				return showForecast(cmd.Context(), o, file)
			}
			return showPolicies(cmd.Context(), o, args)
		},
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what the policy of -f would do")
	cmd.Flags().StringVarP(&file, "filename", "f", "", "file with one SharingPolicy; - for standard input")
	o.AddOutput(cmd, "json or yaml")
	return cmd
}

// policyParts are the parts of the output that are missing without a resource.
func policyParts() cluster.Missing {
	return cluster.Missing{cluster.SlicesName: cluster.NoOffers, cluster.ClaimsName: cluster.NoHolders, cluster.RulesName: cluster.NoRules}
}

func showPolicies(ctx context.Context, o *cluster.Options, names []string) error {
	r, err := o.Reader(policyParts())
	if err != nil {
		return err
	}
	objects, err := r.Objects(ctx, o.CurrentNamespace())
	if err != nil {
		return err
	}
	if err := r.RequireRead("what a SharingPolicy does", cluster.PoliciesName); err != nil {
		return err
	}
	defer r.PrintNotes(o.ErrOut)
	c := view.Build(objects)
	out := []policyView{}
	for i := range objects.Policies {
		p := &objects.Policies[i]
		out = append(out, policyView{Name: p.Name, Plan: forecast.Text(p.Spec.Plan), Spec: p.Spec, Status: p.Status, Devices: devicesUnder(c, p.Name)})
	}
	if len(names) > 0 {
		return onePolicy(o, out, names[0])
	}
	switch {
	case o.Output != "":
		return terminal.Write(o.Out, o.Output, out)
	case len(out) > 0:
		terminal.OneLines(&out)
		return policyTable(o.Out, out)
	default:
		fmt.Fprintln(o.Out, "There are no SharingPolicies: GPUs are offered whole, and in MIG partitions where they can be divided.")
	}
	return nil
}

func onePolicy(o *cluster.Options, all []policyView, name string) error {
	i := slices.IndexFunc(all, func(p policyView) bool { return p.Name == name })
	switch {
	case i < 0:
		return fmt.Errorf("there is no SharingPolicy %s; kubectl gpu policy lists all", name)
	case o.Output != "":
		return terminal.Write(o.Out, o.Output, all[i])
	}
	terminal.OneLines(&all[i])
	return all[i].describe(o.Out)
}

// devicesUnder counts the devices of a policy's GPUs by kind, in the order of the model.
func devicesUnder(c view.Cluster, policy string) []deviceUse {
	var out []deviceUse
	at := func(kind string) *deviceUse {
		i := slices.IndexFunc(out, func(d deviceUse) bool { return d.Kind == kind })
		if i < 0 {
			i, out = len(out), append(out, deviceUse{Kind: kind})
		}
		return &out[i]
	}
	for _, n := range c.Nodes {
		for _, g := range n.GPUs {
			if g.Policy != policy {
				continue
			}
			for _, f := range g.Fits {
				d := at(strings.TrimSpace(f.Type + " " + f.Profile))
				if d.Free == nil {
					d.Free = new(int)
				}
				*d.Free += f.Count
			}
			for _, u := range g.Uses {
				at(strings.TrimSpace(u.Type+" "+u.Profile)).InUse++
			}
		}
	}
	return out
}

func policyTable(out io.Writer, all []policyView) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tPRIORITY\tPLAN\tNODES\tGPUS\tWAITING\tWITHHELD\tAPPLIED")
	for _, p := range all {
		fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%d\t%d\t%d\t%s\n", p.Name, p.Spec.Priority, p.Plan, p.Status.Nodes, p.Status.GPUs, p.Status.WaitingDevices, p.Status.WithheldGPUs, p.applied())
	}
	return w.Flush()
}

// applied is one word on the policy: the first condition that isn't true.
func (p policyView) applied() string {
	for _, t := range []string{v1alpha1.ConditionAccepted, v1alpha1.ConditionApplied} {
		c := meta.FindStatusCondition(p.Status.Conditions, t)
		if c == nil {
			return "unknown"
		}
		if c.Status != metav1.ConditionTrue || t == v1alpha1.ConditionApplied {
			return c.Reason
		}
	}
	return ""
}

// describe prints one policy.
func (p policyView) describe(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%s:\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("Policy", "%s, priority %d", p.Name, p.Spec.Priority)
	row("Plan", "%s", p.Plan)
	row("Nodes", "%s", forecast.NodesText(p.Spec.NodeSelector))
	if p.Spec.GPUSelector != "" {
		row("GPUs", "%s", p.Spec.GPUSelector)
	} else {
		row("GPUs", "all of these nodes")
	}
	for _, c := range p.Status.Conditions {
		row(c.Type, "%s", strings.TrimSuffix(fmt.Sprintf("%s, %s: %s", c.Status, c.Reason, c.Message), ": "))
	}
	row("Has", "%s on %s", terminal.Count(int(p.Status.GPUs), "GPU"), terminal.Count(int(p.Status.Nodes), "node"))
	for _, n := range p.Status.Served {
		row("  "+n.Node, "%s", strings.Join(n.GPUs, ", "))
	}
	for _, d := range p.Devices {
		free := "what else fits isn't known"
		if d.Free != nil {
			free = fmt.Sprintf("%d more fit", *d.Free)
		}
		row("  "+d.Kind, "%d in use, %s", d.InUse, free)
	}
	for _, c := range p.Status.Conflicts {
		row("Lost", "%s to policy %s", terminal.Count(int(c.GPUs), "GPU"), c.Policy)
	}
	for _, d := range p.Status.Waiting {
		row("Waiting", "%s on %s, until claim %s ends", d.Device, d.Node, d.Claim)
	}
	for _, g := range p.Status.Withheld {
		row("Withheld", "%s on %s: %s", g.GPU, g.Node, g.Message)
	}
	for _, x := range p.Status.Problems {
		row("Problem", "%s (%s, such as %s)", x.Message, terminal.Count(int(x.GPUs), "GPU"), x.Example)
	}
	return w.Flush()
}
