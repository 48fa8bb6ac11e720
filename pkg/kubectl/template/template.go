// Package template is kubectl gpu template: the ResourceSlices that a new node will publish.
package template

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

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/decision"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/forecast"
	"github.com/tessera-dra/tessera/pkg/kubectl/machines"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// templateOptions say which node the template is of.
type templateOptions struct {
	node, file, machine, policy, name, driver string
	labels                                    map[string]string
}

//go:embed testdata/help.txt
var shown string // a run of the command, which a test repeats

// Command returns kubectl gpu template.
func Command(o *cluster.Options) *cobra.Command {
	var t templateOptions
	cmd := &cobra.Command{
		Use:   "template (NODE | -f GPUINVENTORY | --machine MACHINE)",
		Short: "Print the ResourceSlices that a new node will publish",
		Long: `Print the ResourceSlices that a node will publish in this cluster if it has the GPUs
of an existing node, of a GPUInventory in a file, or of a machine of known models: for
node templates of autoscalers, and for nodes without machines, such as KWOK's.

The decisions are the controller's own, with the cluster's SharingPolicies and what its
API server stores. Conditions of the GPUs, and claims that have devices of policies from
before, are left out: a new node has neither. A new node's GPUs have other UUIDs, and so
its devices other names and UUID attributes. Of a machine, these aren't known either and
are left out: PCI addresses, PCIe roots, NUMA nodes, the version of CUDA, NVLinks that
don't go through NVSwitches, and fabrics of several nodes. Its MIG mode is off, as after
a driver's installation.

Models: ` + strings.Join(machines.Models(), ", ") + `.`,
		Example: `  kubectl gpu template gpu-node-7
  kubectl gpu template gpu-node-7 --driver-version 590.44.01 --policy half.yaml

  # of a machine that the cluster doesn't have now
  kubectl get gpuinventory gpu-node-7 -o yaml > 8xh100.yaml
  kubectl gpu template -f 8xh100.yaml --labels pool=training

  # of a machine that the cluster never had
  kubectl gpu template --machine 8xh100-80gb --driver-version 580.159.04 --name gpu-node-9

  # for a node of KWOK
  kubectl gpu template gpu-node-7 --name kwok-0 | kubectl apply -f -` + terminal.Shown(shown),
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return o.NodeNames(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cluster.OneOf(o.Output, "", "json", "yaml"); err != nil {
				return err
			}
			t.node = strings.Join(args, "")
			if err := t.check(); err != nil {
				return err
			}
			return printTemplate(cmd.Context(), o, t)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&t.file, "filename", "f", "", "file with a GPUInventory, - for stdin")
	f.StringVar(&t.machine, "machine", "", "GPUs such as 8xh100-80gb, or of several models 2xa100-80gb,4xl40s; with --driver-version")
	f.StringVar(&t.name, "name", "", "name of the new node; without it, that of the GPUInventory, and of a machine new-node")
	f.StringToStringVar(&t.labels, "labels", nil, "labels of the new node, by which policies select it; without them, those of NODE")
	f.StringVar(&t.driver, "driver-version", "", "NVIDIA's driver on the new node; without it, that of the GPUInventory")
	f.StringVar(&t.policy, "policy", "", "file with a SharingPolicy to add to the cluster's, or to replace the one of its name")
	o.AddOutput(cmd, "yaml or json")
	return cmd
}

// check returns an error for arguments that don't go together.
func (t templateOptions) check() error {
	n := 0
	for _, s := range []string{t.node, t.file, t.machine} {
		if s != "" {
			n++
		}
	}
	switch {
	case n != 1:
		return errors.New("name a node, a file with a GPUInventory (-f) or a machine (--machine 8xh100-80gb), and only one of them")
	case t.machine != "" && t.driver == "":
		return errors.New("--machine needs --driver-version: devices have it as an attribute")
	}
	return nil
}

// printTemplate prints what a new node will publish.
func printTemplate(ctx context.Context, o *cluster.Options, t templateOptions) error {
	r, err := o.Reader(nil)
	if err != nil {
		return err
	}
	policies, err := r.Policies(ctx)
	if err != nil {
		return err
	}
	if err := r.RequireRead(templateAnswer, cluster.PoliciesName); err != nil {
		return err
	}
	inv, err := machineOf(ctx, o, r, &t)
	if err != nil {
		return err
	}
	defer r.PrintNotes(o.ErrOut)
	if t.policy != "" {
		p, err := forecast.Read(t.policy, o.In)
		if err != nil {
			return err
		}
		if policies, err = forecast.With(ctx, r, t.policy, p, policies); err != nil {
			return err
		}
	}
	noteLabels(r, t, policies)
	in := decision.Input{Labels: t.labels}
	if in.Policies, err = forecast.Rules(ctx, policies, ""); err != nil {
		return err
	}
	if in.Able, err = forecast.Abilities(ctx, r); err != nil {
		return err
	}
	d := decision.Of(newNode(inv, t), in)
	noteGPUs(r, d)
	return terminal.Write(o.Out, cmp.Or(o.Output, "yaml"), sliceList(d.Pool))
}

// machineOf reads the GPUInventory to go by, and sets the labels to those of its node
// where none are given.
func machineOf(ctx context.Context, o *cluster.Options, r *cluster.Reader, t *templateOptions) (*v1alpha1.GPUInventory, error) {
	switch {
	case t.file != "":
		return readInventory(t.file, o.In)
	case t.machine != "":
		return machines.Inventory(t.machine)
	}
	inventories, err := r.Inventories(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.RequireRead(templateAnswer, cluster.InventoriesName); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(inventories, func(inv v1alpha1.GPUInventory) bool { return inv.Name == t.node })
	if i < 0 {
		return nil, fmt.Errorf("there is no GPUInventory %s: kubectl get gpuinventories lists the nodes with GPUs", t.node)
	}
	if t.labels != nil {
		return &inventories[i], nil
	}
	nodes, err := r.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	for k := range nodes {
		if nodes[k].Name == t.node {
			t.labels = maps.Clone(nodes[k].Labels)
		}
	}
	if _, ok := t.labels[corev1.LabelHostname]; ok && t.name != "" {
		t.labels[corev1.LabelHostname] = t.name
	}
	return &inventories[i], r.RequireRead(templateAnswer, cluster.NodesName)
}

// templateAnswer completes the sentence "can't say …" of RequireRead.
const templateAnswer = "what the node will publish"

// noteGPUs notes which GPUs aren't offered, and on which a policy's selector fails.
func noteGPUs(r *cluster.Reader, d decision.Decision) {
	for _, w := range d.Withheld() {
		r.Note("GPU %s isn't offered: %s.", w.UUID, w.Reason)
	}
	for _, g := range d.Node.GPUs {
		for policy, err := range d.Verdicts[g.UUID].Failed {
			r.Note("SharingPolicy %s doesn't select GPU %d, because spec.gpuSelector fails on it: %v.", policy, g.Index, err)
		}
	}
}

// noteLabels notes which policies select nodes by labels, if the new node's aren't known.
func noteLabels(r *cluster.Reader, t templateOptions, policies []v1alpha1.SharingPolicy) {
	var names []string
	for i := range policies {
		if forecast.NodesText(policies[i].Spec.NodeSelector) != forecast.AllNodes {
			names = append(names, policies[i].Name)
		}
	}
	if len(t.labels) > 0 || len(names) == 0 {
		return
	}
	r.Note("No labels of the new node are known, and these SharingPolicies select nodes by labels: %s. Say the labels with --labels.", strings.Join(names, ", "))
}

// readInventory reads the GPUInventory of a file.
func readInventory(file string, in io.Reader) (*v1alpha1.GPUInventory, error) {
	raw, err := cluster.ReadFile(file, in)
	if err != nil {
		return nil, err
	}
	inv := new(v1alpha1.GPUInventory)
	if err := sigsyaml.UnmarshalStrict(raw, inv); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if inv.Kind != "GPUInventory" || inv.APIVersion != v1alpha1.GroupVersion.String() {
		return nil, fmt.Errorf("%s has apiVersion %q and kind %q: want one GPUInventory of %s, as kubectl get gpuinventory NODE -o yaml prints it",
			file, inv.APIVersion, inv.Kind, v1alpha1.GroupVersion)
	}
	if len(inv.Status.GPUs) == 0 {
		return nil, fmt.Errorf("%s: the GPUInventory has no GPUs in its status", file)
	}
	return inv, nil
}

// newNode returns a new node with the GPUs of the inventory: all in order, and none divided.
func newNode(inv *v1alpha1.GPUInventory, t templateOptions) *v1alpha1.GPUInventory {
	n := inv.DeepCopy()
	if t.name != "" {
		n.Name = t.name
	}
	if t.driver != "" {
		n.Status.DriverVersion = t.driver
	}
	n.Status.Conditions = nil
	for i := range n.Status.GPUs {
		n.Status.GPUs[i].Conditions = nil
		if m := n.Status.GPUs[i].MIG; m != nil {
			m.Instances = nil
		}
	}
	return n
}

// objectList is a list that kubectl apply takes.
type objectList struct {
	metav1.TypeMeta `json:",inline"`
	Items           []resourceapi.ResourceSlice `json:"items"`
}

// sliceList returns the slices of a pool that is published for the first time, without
// the owner and the label by which the controller knows its own.
func sliceList(pool []resourceapi.ResourceSlice) objectList {
	out := objectList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "List"}, Items: []resourceapi.ResourceSlice{}}
	for _, s := range pool {
		s.TypeMeta = metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"}
		s.ObjectMeta = metav1.ObjectMeta{Name: s.Name}
		s.Spec.Pool.Generation = 1
		out.Items = append(out.Items, s)
	}
	return out
}
