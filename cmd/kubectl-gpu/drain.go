package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/view"
)

func drainCommand(o *options) *cobra.Command {
	var how drainFlags
	cmd := &cobra.Command{
		Use:   "drain NODE/GPU | NODE",
		Short: "Keep new claims off a GPU, and evict the pods that use it",
		Long: `Keep new claims off a GPU, or off all GPUs of a node, and evict the pods that use it,
by DeviceTaintRules: one for the node, or one for each device of the GPU, because a rule
can't select a GPU with its partitions and shares. GPU is an index, a UUID or the name of
its device.

The rules are made with the effect None first, which does nothing. The command lists the
pods that would be evicted, and asks. After a yes the effect is NoExecute; after a no the
rules are deleted. Pods whose claims tolerate the taint ` + drainKey + ` for ever
stay. Devices that a SharingPolicy brings later have no rule: drain again.

--dry-run prints the rules and the pods, and changes nothing. --undo deletes the rules.

It takes the verbs create, get, update, list and delete on devicetaintrules. Kubernetes 1.37
has them; older versions need the feature gate DRADeviceTaintRules.`,
		Example: `  kubectl gpu drain node-3/0 --dry-run
  kubectl gpu drain node-3/0
  kubectl gpu drain node-3 --yes
  kubectl gpu drain node-3/0 --undo`,
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return o.gpuNames(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.drain(cmd.Context(), args[0], how)
		},
	}
	cmd.Flags().BoolVar(&how.dryRun, "dry-run", false, "print the rules and the pods that would be evicted")
	cmd.Flags().BoolVar(&how.undo, "undo", false, "delete the rules that drain has made")
	cmd.Flags().BoolVarP(&how.yes, "yes", "y", false, "don't ask")
	o.addOutput(cmd, "json or yaml, of --dry-run; default: the rules, with the pods as comments")
	return cmd
}

type drainFlags struct{ dryRun, undo, yes bool }

// check returns an error for flags that don't go together.
func (o *options) check(how drainFlags) error {
	switch {
	case how.dryRun && (how.undo || how.yes), how.undo && how.yes:
		return errors.New("--dry-run, --undo and --yes exclude each other")
	case o.output != "" && !how.dryRun:
		return errors.New("-o is for --dry-run")
	case how == (drainFlags{}) && !isTerminal(o.In):
		return errors.New("standard input is no terminal, so nobody can be asked: --dry-run shows what would be done, --yes does it")
	}
	return oneOf(o.output, "", "json", "yaml")
}

func (o *options) drain(ctx context.Context, target string, how drainFlags) error {
	if err := o.check(how); err != nil {
		return err
	}
	d, err := o.newDrain(ctx, target)
	switch {
	case err != nil:
		return err
	case how.undo:
		return d.undo(ctx)
	case how.dryRun:
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
func (o *options) gpuNames(ctx context.Context) []string {
	r, err := o.reader()
	if err != nil {
		return nil
	}
	c, err := r.model(ctx, o.currentNamespace(), false)
	if err != nil {
		return nil
	}
	var out []string
	for _, n := range c.Nodes {
		out = append(out, n.Name)
		for _, g := range n.GPUs {
			out = append(out, fmt.Sprintf("%s/%d", n.Name, g.Index))
		}
	}
	return out
}

// drain is a GPU, or a node, to be drained.
type drain struct {
	*reader
	options *options

	target string
	node   string
	gpu    *view.GPU // nil: all of the node
	// all: all claims could be listed.
	all     bool
	objects view.Objects
}

// eviction is a pod that goes, or would go.
type eviction struct {
	Pod    string `json:"pod"`
	Claim  string `json:"claim"`
	Device string `json:"device"`
}

func (o *options) newDrain(ctx context.Context, target string) (*drain, error) {
	r, err := o.reader()
	if err != nil {
		return nil, err
	}
	d := &drain{reader: r, options: o, target: target}
	if d.objects, d.all, err = r.objects(ctx, o.currentNamespace()); err != nil {
		return nil, err
	}
	_, err = r.resources.DeviceTaintRules().List(ctx, metav1.ListOptions{Limit: 1})
	switch {
	case apierrors.IsNotFound(err):
		return nil, errors.New("the API server has no DeviceTaintRules: Kubernetes has them from 1.37 on, and before that with the feature gate DRADeviceTaintRules and " +
			"its version of resource.k8s.io in --runtime-config. Instead, cordon the node (kubectl cordon), so that no new pods come, and delete the pods that kubectl gpu get lists for the GPU")
	case apierrors.IsForbidden(err):
		return nil, fmt.Errorf("you may not list devicetaintrules.resource.k8s.io: ask for the verbs create, get, update, list and delete on them (%w)", err)
	case err != nil:
		return nil, fmt.Errorf("list devicetaintrules.resource.k8s.io: %w", err)
	}
	return d, d.find(build(d.objects, d.all))
}

// find looks up the node and the GPU.
func (d *drain) find(c view.Cluster) error {
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
	k := slices.IndexFunc(gpus, func(g view.GPU) bool { return name == strconv.Itoa(g.Index) || name == g.UUID || name == g.Device })
	if k < 0 {
		return fmt.Errorf("node %s has no GPU %s; kubectl gpu map %s shows its GPUs", node, name, node)
	}
	d.gpu = &gpus[k]
	return nil
}

// concerns reports whether a device of the node is to be drained.
func (d *drain) concerns(device string) bool {
	return d.gpu == nil || string(gpu.DeviceName(device).Whole()) == d.gpu.Device
}

// rules are those to make, by name.
func (d *drain) rules(effect resourceapi.DeviceTaintEffect) []resourceapi.DeviceTaintRule {
	rule := func(device string) resourceapi.DeviceTaintRule {
		r := resourceapi.DeviceTaintRule{TypeMeta: metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "DeviceTaintRule"}}
		r.Name, r.Labels = strings.TrimSuffix("drain-"+d.node+"-"+device, "-"), map[string]string{drainKey: ""}
		driver, pool := gpu.DriverName, d.node
		r.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{Driver: &driver, Pool: &pool}
		if device != "" {
			r.Spec.DeviceSelector.Device = &device
		}
		r.Spec.Taint = resourceapi.DeviceTaint{Key: drainKey, Effect: effect}
		return r
	}
	if d.gpu == nil {
		return []resourceapi.DeviceTaintRule{rule("")}
	}
	names := []string{d.gpu.Device}
	for i := range d.objects.Slices {
		if s := &d.objects.Slices[i].Spec; s.Pool.Name == d.node {
			for k := range s.Devices {
				names = append(names, s.Devices[k].Name)
			}
		}
	}
	for _, u := range d.gpu.Uses {
		names = append(names, u.Device)
	}
	slices.Sort(names)
	var out []resourceapi.DeviceTaintRule
	for _, name := range slices.Compact(names) {
		if d.concerns(name) {
			out = append(out, rule(name))
		}
	}
	return out
}

// evictions are the pods that NoExecute evicts, and those whose claims tolerate it.
func (d *drain) evictions() (gone, stay []eviction) {
	taint := resourceapi.DeviceTaint{Key: drainKey, Effect: resourceapi.DeviceTaintEffectNoExecute}
	gone, stay = []eviction{}, []eviction{}
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
			for _, by := range c.Status.ReservedFor {
				e := eviction{Pod: c.Namespace + "/" + by.Name, Claim: c.Name, Device: r.Device}
				same := func(x eviction) bool { return x.Pod == e.Pod }
				if by.APIGroup == "" && by.Resource == "pods" && !slices.ContainsFunc(*into, same) {
					*into = append(*into, e)
				}
			}
		}
	}
	// A pod with one claim that tolerates the taint and one that doesn't goes.
	stay = slices.DeleteFunc(stay, func(s eviction) bool {
		return slices.ContainsFunc(gone, func(g eviction) bool { return g.Pod == s.Pod })
	})
	return gone, stay
}

// toleratesForEver reports whether pods with such tolerations stay.
func toleratesForEver(all []resourceapi.DeviceToleration, taint resourceapi.DeviceTaint) bool {
	return slices.ContainsFunc(all, func(t resourceapi.DeviceToleration) bool {
		return t.TolerationSeconds == nil && resourceclaim.ToleratesTaint(t, taint)
	})
}

// plan is the output of --dry-run -o json.
type plan struct {
	Rules   []resourceapi.DeviceTaintRule `json:"rules"`
	Evicted []eviction                    `json:"evicted"`
	Stay    []eviction                    `json:"stay"`
}

// show prints the rules, with the pods as comments, so that kubectl apply takes it.
func (d *drain) show() error {
	defer d.tell(d.options.ErrOut)
	p := plan{Rules: d.rules(resourceapi.DeviceTaintEffectNone)}
	p.Evicted, p.Stay = d.evictions()
	if d.options.output != "" {
		return write(d.options.Out, d.options.output, p)
	}
	for i := range p.Rules {
		raw, err := yaml.Marshal(manifest(&p.Rules[i]))
		if err != nil {
			return fmt.Errorf("write YAML: %w", err)
		}
		fmt.Fprintf(d.options.Out, "---\n%s", raw)
	}
	d.list("# ", p.Evicted, p.Stay)
	return nil
}

// manifest is a rule without fields that only a server sets.
func manifest(r *resourceapi.DeviceTaintRule) any {
	return map[string]any{
		"apiVersion": r.APIVersion, "kind": r.Kind, "metadata": map[string]any{"name": r.Name, "labels": r.Labels},
		"spec": map[string]any{"deviceSelector": r.Spec.DeviceSelector, "taint": map[string]any{"key": r.Spec.Taint.Key, "effect": r.Spec.Taint.Effect}},
	}
}

// list prints the pods that go and stay.
func (d *drain) list(prefix string, gone, stay []eviction) {
	unsure := ""
	if !d.all {
		unsure = " of the claims that you may list"
	}
	if len(gone) == 0 {
		fmt.Fprintf(d.options.Out, "%sNo pod%s would be evicted.\n", prefix, unsure)
	} else {
		fmt.Fprintf(d.options.Out, "%sPods%s that would be evicted with the effect NoExecute:\n", prefix, unsure)
	}
	for _, e := range gone {
		fmt.Fprintf(d.options.Out, "%s  %s (claim %s, %s)\n", prefix, e.Pod, e.Claim, e.Device)
	}
	for _, e := range stay {
		fmt.Fprintf(d.options.Out, "%sStays, because its claim tolerates the taint: %s (claim %s, %s)\n", prefix, e.Pod, e.Claim, e.Device)
	}
}

// run makes the rules, asks, and sets their effect, or deletes them. Rules that are
// there from before stay.
func (d *drain) run(ctx context.Context, yes bool) error {
	defer d.tell(d.options.ErrOut)
	made, err := d.create(ctx)
	if err != nil {
		return errors.Join(err, d.delete(ctx, made))
	}
	fmt.Fprintf(d.options.Out, "%s made with the effect None: nothing has changed yet.\n", count(len(made), "DeviceTaintRule"))
	gone, stay := d.evictions()
	d.list("", gone, stay)
	if !yes {
		fmt.Fprintf(d.options.Out, "Keep new claims off %s, and evict %s? [y/N] ", d.target, count(len(gone), "pod"))
		if said := answer(ctx, d.options.In); said != "y" && said != "yes" {
			if err := d.delete(ctx, made); err != nil {
				return err
			}
			fmt.Fprintln(d.options.Out, "These rules are deleted; nothing was changed.")
			return errNo
		}
	}
	if err := d.enforce(ctx); err != nil {
		return fmt.Errorf("%w; some of the rules may be in force: try again, or undo it with kubectl gpu drain %s --undo", err, d.target)
	}
	fmt.Fprintf(d.options.Out, "New claims don't get %s any more, and its pods are being evicted. kubectl gpu map %s shows what is left.\nUndo it with: kubectl gpu drain %s --undo\n", d.target, d.node, d.target)
	return nil
}

// answer reads a line; it is empty if the context ends first.
func answer(ctx context.Context, in io.Reader) string {
	said := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(in).ReadString('\n') // no answer is a no
		said <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case a := <-said:
		return a
	case <-ctx.Done():
		return ""
	}
}

// create creates the rules that aren't there, with the effect None, and returns their
// names.
func (d *drain) create(ctx context.Context) (made []string, err error) {
	rules := d.rules(resourceapi.DeviceTaintEffectNone)
	for i := range rules {
		_, err := d.resources.DeviceTaintRules().Create(ctx, &rules[i], metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			continue
		}
		if err != nil {
			return made, d.failed("create", rules[i].Name, err)
		}
		made = append(made, rules[i].Name)
	}
	return made, nil
}

// enforce sets the effect of the rules. Kubernetes writes their status meanwhile.
func (d *drain) enforce(ctx context.Context) error {
	all, err := d.there(ctx)
	if err != nil {
		return err
	}
	client := d.resources.DeviceTaintRules()
	for i := range all {
		rule := &all[i]
		err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
			rule.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
			_, err := client.Update(ctx, rule, metav1.UpdateOptions{})
			if !apierrors.IsConflict(err) {
				return err
			}
			now, failed := client.Get(ctx, rule.Name, metav1.GetOptions{})
			if failed != nil {
				return failed
			}
			rule = now
			return err
		})
		if err != nil {
			return d.failed("update", rule.Name, err)
		}
	}
	return nil
}

// there are the rules for the target that drain has made, now or earlier.
func (d *drain) there(ctx context.Context) ([]resourceapi.DeviceTaintRule, error) {
	all, err := list(ctx, func(ctx context.Context, l metav1.ListOptions) (*resourceapi.DeviceTaintRuleList, error) {
		l.LabelSelector = drainKey
		return d.resources.DeviceTaintRules().List(ctx, l)
	}, func(l *resourceapi.DeviceTaintRuleList) []resourceapi.DeviceTaintRule { return l.Items })
	if err != nil {
		return nil, fmt.Errorf("list devicetaintrules.resource.k8s.io: %w", err)
	}
	return slices.DeleteFunc(all, func(r resourceapi.DeviceTaintRule) bool {
		s := r.Spec.DeviceSelector
		return s == nil || s.Pool == nil || *s.Pool != d.node || (s.Device == nil) != (d.gpu == nil) || s.Device != nil && !d.concerns(*s.Device)
	}), nil
}

// deleteWithin bounds the deletion, which goes on after an interrupt.
const deleteWithin = 20 * time.Second

func (d *drain) delete(ctx context.Context, names []string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteWithin)
	defer cancel()
	for _, name := range names {
		err := d.resources.DeviceTaintRules().Delete(ctx, name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return d.failed("delete", name, err)
		}
	}
	return nil
}

func (d *drain) failed(verb, name string, err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("you may not %s devicetaintrules.resource.k8s.io: ask for the verbs create, get, update, list and delete on them (%w)", verb, err)
	}
	return fmt.Errorf("%s DeviceTaintRule %s: %w", verb, name, err)
}

func (d *drain) undo(ctx context.Context) error {
	all, err := d.there(ctx)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return fmt.Errorf("no rules of kubectl gpu drain are there for %s: kubectl get devicetaintrules -l %s lists all", d.target, drainKey)
	}
	var names []string
	for i := range all {
		names = append(names, all[i].Name)
	}
	if err := d.delete(ctx, names); err != nil {
		return err
	}
	fmt.Fprintf(d.options.Out, "%s deleted: new claims can get %s again, unless something else keeps them off it.\n", count(len(names), "DeviceTaintRule"), d.target)
	return nil
}
