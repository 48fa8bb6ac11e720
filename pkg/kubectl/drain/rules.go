package drain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/yaml"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/cluster"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
)

// checkRules returns an error if there are no DeviceTaintRules, or the user may not list
// them.
func (d *drainer) checkRules(ctx context.Context) error {
	_, err := d.Rules.List(ctx, metav1.ListOptions{Limit: 1})
	if apierrors.IsNotFound(err) {
		return errors.New("the API server has no DeviceTaintRules: Kubernetes has them from 1.37 on, and before that with the feature gate DRADeviceTaintRules (1.33 and 1.34: DRADeviceTaints) and " +
			"its version of resource.k8s.io in --runtime-config. Instead, cordon the node (kubectl cordon), so that no new pods come, and delete the pods that kubectl gpu get lists for the GPU")
	}
	return d.failed("list", "devicetaintrules.resource.k8s.io", err)
}

// failed returns an error of a request, with the rights to ask for.
func (d *drainer) failed(verb, object string, err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsForbidden(err):
		return fmt.Errorf("you may not %s devicetaintrules.resource.k8s.io: ask for the verbs create, update, list and delete on them (%w)", verb, err)
	}
	return fmt.Errorf("%s %s: %w", verb, object, err)
}

// ruleFor is the rule for a device of the node, or for "" the one for the whole node.
func (d *drainer) ruleFor(device string) resourceapi.DeviceTaintRule {
	r := resourceapi.DeviceTaintRule{TypeMeta: metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: cluster.RuleKind}}
	r.Name, r.Labels = strings.TrimSuffix("drain-"+d.node+"-"+device, "-"), map[string]string{drainKey: ""}
	driver, pool := gpu.DriverName, d.node
	r.Spec.DeviceSelector = &resourceapi.DeviceTaintSelector{Driver: &driver, Pool: &pool}
	if device != "" {
		r.Spec.DeviceSelector.Device = &device
	}
	r.Spec.Taint = resourceapi.DeviceTaint{Key: drainKey, Effect: resourceapi.DeviceTaintEffectNoExecute}
	return r
}

// wanted are the rules that drain the target, by name.
func (d *drainer) wanted() []resourceapi.DeviceTaintRule {
	if d.gpu == nil {
		return []resourceapi.DeviceTaintRule{d.ruleFor("")}
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
			out = append(out, d.ruleFor(name))
		}
	}
	return out
}

// own reports whether drain has made a rule for the target, now or earlier.
func (d *drainer) own(r *resourceapi.DeviceTaintRule) bool {
	s := r.Spec.DeviceSelector
	_, labelled := r.Labels[drainKey]
	switch {
	case !labelled || r.Spec.Taint.Key != drainKey || s == nil || s.Driver != nil && *s.Driver != gpu.DriverName || s.Pool == nil || *s.Pool != d.node:
		return false
	case d.gpu == nil:
		return s.Device == nil
	}
	return s.Device != nil && d.concerns(*s.Device)
}

// drainPlan has the actions of a drain, computed from the rules and pods that were read.
type drainPlan struct {
	// create are the missing rules, enforce the existing rules of drain's without the
	// effect NoExecute, and inForce the names of drain's other rules.
	create, enforce []resourceapi.DeviceTaintRule
	inForce         []string
	// evicted are the pods that are evicted, stay those whose claims tolerate the taint.
	evicted, stay []eviction
}

// plan compares the existing rules with those that drain the target. It is an error if a
// rule with the name of one of drain's isn't drain's.
func (d *drainer) plan() (drainPlan, error) {
	var p drainPlan
	there := make(map[string]*resourceapi.DeviceTaintRule)
	for i := range d.objects.TaintRules {
		r := &d.objects.TaintRules[i]
		there[r.Name] = r
		switch {
		case !d.own(r):
		case r.Spec.Taint.Effect == resourceapi.DeviceTaintEffectNoExecute:
			p.inForce = append(p.inForce, r.Name)
		default:
			p.enforce = append(p.enforce, *r)
		}
	}
	for _, r := range d.wanted() {
		switch found := there[r.Name]; {
		case found == nil:
			p.create = append(p.create, r)
		case !d.own(found):
			return p, fmt.Errorf("there is a DeviceTaintRule %s that isn't drain's: it hasn't the label %s, or another selector or taint. Delete it, or make it again under another name (kubectl get devicetaintrule %s -o yaml)",
				r.Name, drainKey, r.Name)
		}
	}
	p.evicted, p.stay = d.evictions()
	return p, nil
}

// rulesInForce reports whether all rules are in force.
func (p drainPlan) rulesInForce() bool { return len(p.create)+len(p.enforce) == 0 }

// same reports whether two plans do the same.
func (p drainPlan) same(q drainPlan) bool {
	byName := func(a, b resourceapi.DeviceTaintRule) bool { return a.Name == b.Name }
	return slices.EqualFunc(p.create, q.create, byName) && slices.EqualFunc(p.enforce, q.enforce, byName) &&
		slices.Equal(p.evicted, q.evicted) && slices.Equal(p.stay, q.stay)
}

// dryRunPlan is the output of --dry-run -o json.
type dryRunPlan struct {
	// Rules that would be made, as manifests of the server's version.
	Rules []any `json:"rules"`
	// InForce are the names of rules that are there.
	InForce []string   `json:"inForce,omitempty"`
	Evicted []eviction `json:"evicted"`
	Stay    []eviction `json:"stay"`
}

// show prints the rules, with the pods as comments, so that kubectl apply takes it.
func (d *drainer) show() error {
	plan, err := d.plan()
	if err != nil {
		return err
	}
	p := dryRunPlan{Evicted: plan.evicted, Stay: plan.stay, Rules: []any{}, InForce: plan.inForce}
	effect, apiVersion := d.harmless(), d.Rules.APIVersion(d.Kube.Discovery())
	for _, r := range slices.Concat(plan.create, plan.enforce) {
		r.Spec.Taint.Effect = effect
		p.Rules = append(p.Rules, manifest(apiVersion, &r))
	}
	if len(p.Rules) > 0 && effect != resourceapi.DeviceTaintEffectNone {
		fmt.Fprintln(d.options.ErrOut, "Warning: this server doesn't know the effect None: if these rules are applied, they evict pods.")
	}
	if d.options.Output != "" {
		return terminal.Write(d.options.Out, d.options.Output, p)
	}
	for _, r := range p.Rules {
		raw, err := yaml.Marshal(r)
		if err != nil {
			return fmt.Errorf("write YAML: %w", err)
		}
		fmt.Fprintf(d.options.Out, "---\n%s", raw)
	}
	switch {
	case len(p.Rules) == 0:
		fmt.Fprintf(d.options.Out, "# Nothing is left to do: %s in force.\n", isOrAre(len(p.InForce), "DeviceTaintRule"))
	case effect == resourceapi.DeviceTaintEffectNone:
		fmt.Fprintf(d.options.Out, "# Nothing was changed, and with the effect None these rules change nothing.\n# kubectl gpu drain %s asks, and makes them with the effect NoExecute.\n", d.target)
	default:
		fmt.Fprintln(d.options.Out, "# Nothing was changed.")
	}
	d.list("# ", p.Evicted, p.Stay)
	return nil
}

// isOrAre is "1 rule is" or "2 rules are".
func isOrAre(n int, what string) string {
	if n == 1 {
		return terminal.Count(n, what) + " is"
	}
	return terminal.Count(n, what) + " are"
}

// harmless is the effect None where the server has it, from Kubernetes 1.35 on.
func (d *drainer) harmless() resourceapi.DeviceTaintEffect {
	v, err := d.Kube.Discovery().ServerVersion()
	if err != nil {
		return resourceapi.DeviceTaintEffectNone // the server answers; a newer one has it
	}
	parsed, err := utilversion.ParseGeneric(v.GitVersion)
	if err == nil && parsed.LessThan(utilversion.MajorMinor(1, 35)) {
		return resourceapi.DeviceTaintEffectNoExecute
	}
	return resourceapi.DeviceTaintEffectNone
}

// manifest is a rule without fields that only a server sets.
func manifest(apiVersion string, r *resourceapi.DeviceTaintRule) any {
	return map[string]any{
		"apiVersion": apiVersion, "kind": cluster.RuleKind, "metadata": map[string]any{"name": r.Name, "labels": r.Labels},
		"spec": map[string]any{"deviceSelector": r.Spec.DeviceSelector, "taint": map[string]any{"key": r.Spec.Taint.Key, "effect": r.Spec.Taint.Effect}},
	}
}

// run shows the plan, asks, and carries it out after a yes. It asks again if the plan is
// another one after the rules and pods have been read again.
func (d *drainer) run(ctx context.Context, yes bool) error {
	p, err := d.plan()
	if err != nil {
		return err
	}
	for !p.rulesInForce() {
		d.list("", p.evicted, p.stay)
		// Don't ask the user about rules that the server refuses.
		if err := d.writeRules(ctx, p, metav1.DryRunAll); err != nil {
			return err
		}
		if yes {
			return d.carryOut(ctx, p)
		}
		fmt.Fprintf(d.options.Out, "Keep new claims off %s, and evict %s? [y/N] ", d.target, podCount(p.evicted))
		if said := d.answer(ctx); said != "y" && said != "yes" {
			fmt.Fprintln(d.options.Out, "\nNothing was changed.")
			return cluster.ErrNo
		}
		if err := d.read(ctx); err != nil {
			return err
		}
		now, err := d.plan()
		if err != nil {
			return err
		}
		if now.same(p) {
			return d.carryOut(ctx, now)
		}
		fmt.Fprintln(d.options.Out, "Not done yet: the pods or DeviceTaintRules have changed since you were asked. This is the new plan:")
		p = now
	}
	d.already(p)
	return nil
}

// podCount counts the pods; those of a PodGroup of which none is known have no number.
func podCount(all []eviction) string {
	pods := 0
	var out []string
	for _, e := range all {
		if e.Pod == "" {
			out = append(out, "the pods of PodGroup "+e.PodGroup)
			continue
		}
		pods++
	}
	if pods > 0 || len(out) == 0 {
		out = append([]string{terminal.Count(pods, "pod")}, out...)
	}
	return strings.Join(out, " and ")
}

// already says that there is nothing to do.
func (d *drainer) already(p drainPlan) {
	fmt.Fprintf(d.options.Out, "%s is drained already: %s in force.\n", d.target, isOrAre(len(p.inForce), "DeviceTaintRule"))
	for _, e := range slices.Concat(p.evicted, p.stay) {
		fmt.Fprintf(d.options.Out, "Still there: %s\n", e)
	}
}

// carryOut makes the rules.
func (d *drainer) carryOut(ctx context.Context, p drainPlan) error {
	if err := d.writeRules(ctx, p); err != nil {
		return fmt.Errorf("%w; some of the rules may be in force: try again, or undo it with kubectl gpu drain %s --undo", err, d.target)
	}
	fmt.Fprintf(d.options.Out, "%s in force: new claims don't get %s any more, and its pods are being evicted.\nkubectl gpu map %s shows what is left.\nUndo it with: kubectl gpu drain %s --undo\n",
		isOrAre(len(p.create)+len(p.enforce)+len(p.inForce), "DeviceTaintRule"), d.target, d.node, d.target)
	return nil
}

// answer reads a line; it is empty if the context ends first.
func (d *drainer) answer(ctx context.Context) string {
	said := make(chan string, 1)
	go func() {
		line, _ := d.in.ReadString('\n') // no answer is a no
		said <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case a := <-said:
		return a
	case <-ctx.Done():
		return ""
	}
}

// writeRules creates and updates the rules, or only tries to with metav1.DryRunAll.
func (d *drainer) writeRules(ctx context.Context, p drainPlan, dryRun ...string) error {
	for i := range p.create {
		r := p.create[i].DeepCopy()
		err := d.Rules.Create(ctx, r, metav1.CreateOptions{DryRun: dryRun})
		if apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("somebody has made DeviceTaintRule %s at this moment: drain again (%w)", r.Name, err)
		}
		if err != nil {
			return d.failed("create", "DeviceTaintRule "+r.Name, err)
		}
	}
	for i := range p.enforce {
		if err := d.enforce(ctx, p.enforce[i].DeepCopy(), dryRun); err != nil {
			return err
		}
	}
	return nil
}

// enforce sets the effect of a rule of drain's.
func (d *drainer) enforce(ctx context.Context, rule *resourceapi.DeviceTaintRule, dryRun []string) error {
	object := "DeviceTaintRule " + rule.Name
	return d.change(ctx, rule, func(rule *resourceapi.DeviceTaintRule) error {
		rule.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
		return d.failed("update", object, d.Rules.Update(ctx, rule, metav1.UpdateOptions{DryRun: dryRun}))
	}, fmt.Errorf("%s is gone: drain again", object), fmt.Errorf("%s is another one now: drain again", object))
}

// change calls do with a rule of drain's, and with the rule as it is then if it has changed:
// Kubernetes writes its status meanwhile, and anybody may change the rest, or delete it. The
// errors are for a rule that is gone, and for one that isn't drain's any more.
func (d *drainer) change(ctx context.Context, rule *resourceapi.DeviceTaintRule, do func(*resourceapi.DeviceTaintRule) error, gone, another error) error {
	return retry.RetryOnConflict(retry.DefaultRetry, func() error {
		err := do(rule)
		if !apierrors.IsConflict(err) {
			return err
		}
		now, failed := d.current(ctx, rule.Name)
		switch {
		case failed != nil:
			return failed
		case now == nil:
			return gone
		case !d.own(now):
			return another
		}
		rule = now
		return err
	})
}

// current returns a rule as it is now; nil: it is gone.
func (d *drainer) current(ctx context.Context, name string) (*resourceapi.DeviceTaintRule, error) {
	now, err := d.Rules.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	if err != nil || len(now.Items) == 0 {
		return nil, d.failed("list", "DeviceTaintRule "+name, err)
	}
	return &now.Items[0], nil
}

// remove deletes a rule of drain's, unless it isn't drain's any more.
func (d *drainer) remove(ctx context.Context, rule *resourceapi.DeviceTaintRule) error {
	object := "DeviceTaintRule " + rule.Name
	return d.change(ctx, rule, func(rule *resourceapi.DeviceTaintRule) error {
		seen := metav1.Preconditions{UID: &rule.UID, ResourceVersion: &rule.ResourceVersion}
		err := d.Rules.Delete(ctx, rule.Name, metav1.DeleteOptions{Preconditions: &seen})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return d.failed("delete", object, err)
	}, nil, fmt.Errorf("%s is another one now, and was left alone: look at it with kubectl get devicetaintrules %s -o yaml", object, rule.Name))
}

// undo deletes the rules that drain has made for the target.
func (d *drainer) undo(ctx context.Context) error {
	n := 0
	for i := range d.objects.TaintRules {
		r := &d.objects.TaintRules[i]
		if !d.own(r) {
			continue
		}
		n++
		if err := d.remove(ctx, r.DeepCopy()); err != nil {
			return err
		}
	}
	if n == 0 {
		return fmt.Errorf("no rules of kubectl gpu drain are there for %s: kubectl get devicetaintrules -l %s lists all", d.target, drainKey)
	}
	fmt.Fprintf(d.options.Out, "%s deleted: new claims can get %s again, unless something else keeps them off it.\n", terminal.Count(n, "DeviceTaintRule"), d.target)
	return nil
}
