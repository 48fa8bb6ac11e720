package policy

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/decision"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/terminal"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// planFacts are those that a forecast follows from.
type planFacts struct {
	nodes         []corev1.Node
	inventories   []v1alpha1.GPUInventory
	claims        []resourceapi.ResourceClaim
	before, after []policy.Policy
	server        publish.Abilities
	now           time.Time
}

// policyForecast is the effect that a policy would have.
type policyForecast struct {
	Policy string `json:"policy"`
	Plan   string `json:"plan"`
	// GPUs that the policy would have.
	GPUs int `json:"gpus"`
	// Lost counts the GPUs that the policy selects and others have, by policy.
	Lost map[string]int `json:"lost,omitempty"`
	// Nodes on which something would be different, or the policy would have GPUs.
	Nodes []nodeForecast `json:"nodes"`
}

type nodeForecast struct {
	Node string        `json:"node"`
	GPUs []gpuForecast `json:"gpus"`
}

// gpuForecast is the effect on a GPU.
type gpuForecast struct {
	Index  int    `json:"index"`
	Device string `json:"device"`
	Model  string `json:"model"`
	// Before and After are the policies that have it; empty: none.
	Before string `json:"before,omitempty"`
	After  string `json:"after,omitempty"`
	// Added and Removed are the devices that would be offered, and no longer be offered,
	// once the claims that have leftovers have ended.
	Added   []kindCount `json:"added,omitempty"`
	Removed []kindCount `json:"removed,omitempty"`
	// Leftovers are devices that stay until their claims end, and that no other claim
	// gets.
	Leftovers []leftoverDevice `json:"leftovers,omitempty"`
	Problems  []string         `json:"problems,omitempty"`
}

type kindCount struct {
	Kind  string `json:"kind"`
	Count int    `json:"count"`
}

type leftoverDevice struct {
	Device string   `json:"device"`
	Claims []string `json:"claims"`
}

// predict compares the offers with and without the policy.
func (p planFacts) predict(name string) policyForecast {
	out := policyForecast{Policy: name, Lost: make(map[string]int), Nodes: []nodeForecast{}}
	byNode := make(map[string]labels.Set, len(p.nodes))
	for i := range p.nodes {
		byNode[p.nodes[i].Name] = p.nodes[i].Labels
	}
	for i := range p.inventories {
		inv := &p.inventories[i]
		set, known := byNode[inv.Name]
		if !known {
			continue // the controller decides nothing for it either
		}
		n := nodeForecast{Node: inv.Name}
		for _, g := range p.node(inv, set, name, out.Lost) {
			if g.After == name {
				out.GPUs++
			}
			n.GPUs = append(n.GPUs, g)
		}
		if len(n.GPUs) > 0 {
			out.Nodes = append(out.Nodes, n)
		}
	}
	return out
}

// node forecasts the GPUs of a node that the policy has, had, or changes otherwise.
func (p planFacts) node(inv *v1alpha1.GPUInventory, set labels.Set, name string, lost map[string]int) []gpuForecast {
	holders := p.holders(inv.Name)
	in := decision.Input{Labels: set, Policies: p.before, Able: p.server, Now: p.now}
	for device, claims := range holders {
		in.Allocated = append(in.Allocated, slices.Repeat([]gpu.DeviceName{device}, len(claims))...)
	}
	before := decision.Of(inv, in)
	in.Policies = p.after
	after := decision.Of(inv, in)
	in.Allocated = nil
	finally := decision.Of(inv, in)
	var out []gpuForecast
	for _, g := range after.Node.GPUs {
		was, is := before.Verdicts[g.UUID], after.Verdicts[g.UUID]
		offered, _ := after.Offer(g.UUID)
		if slices.Contains(is.Lost, name) {
			lost[is.Policy]++
		}
		f := gpuForecast{Index: g.Index, Device: string(offered.Name), Model: g.Model.ProductName, Before: was.Policy, After: is.Policy}
		switch err := is.Failed[name]; {
		case err != nil:
			f.Problems = append(f.Problems, fmt.Sprintf("It isn't selected, because spec.gpuSelector fails on it: %v.", err))
		case is.Policy == name:
			f.Problems = problems(g.UUID, after)
		case was.Policy != name:
			continue
		}
		f.Added, f.Removed = differences(kinds(before, g.UUID), kinds(finally, g.UUID))
		for _, d := range offered.Leftover {
			f.Leftovers = append(f.Leftovers, leftoverDevice{Device: string(d), Claims: holders[d]})
		}
		out = append(out, f)
	}
	return out
}

// problems returns the parts of the plan that can't be carried out on a GPU.
func problems(uuid gpu.UUID, d decision.Decision) []string {
	o, _ := d.Offer(uuid)
	out := slices.Clone(o.Problems)
	if o.WithoutWhole != "" {
		out = append(out, o.WithoutWhole)
	}
	if len(o.Missing) > 0 {
		out = append(out, "The GPU hasn't the profile "+strings.Join(o.Missing, ", ")+".")
	}
	for _, w := range d.Withheld() {
		if w.UUID == uuid {
			out = append(out, "New claims don't get all of it: "+w.Reason+".")
		}
	}
	return out
}

// holders are the claims that have each of the node's devices, each once.
func (p planFacts) holders(node string) map[gpu.DeviceName][]string {
	out := make(map[gpu.DeviceName][]string)
	for i := range p.claims {
		c := &p.claims[i]
		if c.Status.Allocation == nil {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			name, device := c.Namespace+"/"+c.Name, gpu.DeviceName(r.Device)
			if r.Driver == gpu.DriverName && r.Pool == node && (r.AdminAccess == nil || !*r.AdminAccess) && !slices.Contains(out[device], name) {
				out[device] = append(out[device], name)
			}
		}
	}
	return out
}

// kinds counts the devices of a GPU that new claims can have, in the offer's order.
func kinds(of decision.Decision, uuid gpu.UUID) []kindCount {
	o, _ := of.Offer(uuid)
	var out []kindCount
	for i := range o.Devices {
		d := &o.Devices[i]
		if slices.Contains(o.Leftover, gpu.DeviceName(d.Name)) {
			continue
		}
		kind := kindOf(d)
		k := slices.IndexFunc(out, func(c kindCount) bool { return c.Kind == kind })
		if k < 0 {
			k, out = len(out), append(out, kindCount{Kind: kind})
		}
		out[k].Count++
	}
	return out
}

// kindOf names a device: "gpu", "mig 3g.40gb", "mps 20Gi".
func kindOf(d *resourceapi.Device) string {
	out := ""
	for _, name := range []resourceapi.QualifiedName{"type", "profile"} {
		if s := d.Attributes[name].StringValue; s != nil {
			out = strings.TrimSpace(out + " " + *s)
		}
	}
	several := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
	if c, ok := d.Capacity[gpu.MemoryCapacity]; ok && strings.HasPrefix(out, gpu.TypeMPS) && !several {
		out += " " + terminal.Gibibytes(c.Value.Value())
	}
	if several {
		out += " (for several claims)"
	}
	return out
}

// differences are the kinds of which there are more, and of which there are fewer.
func differences(before, after []kindCount) (added, removed []kindCount) {
	more := func(all, other []kindCount) []kindCount {
		var out []kindCount
		for _, c := range all {
			if i := slices.IndexFunc(other, func(o kindCount) bool { return o.Kind == c.Kind }); i >= 0 {
				c.Count -= other[i].Count
			}
			if c.Count > 0 {
				out = append(out, c)
			}
		}
		return out
	}
	return more(after, before), more(before, after)
}

// print writes the forecast. Nodes of which the same is to be said are one paragraph,
// and so are GPUs.
func (f policyForecast) print(out io.Writer) {
	var nodes int
	for _, n := range f.Nodes {
		if slices.ContainsFunc(n.GPUs, func(g gpuForecast) bool { return g.After == f.Policy }) {
			nodes++
		}
	}
	fmt.Fprintf(out, "SharingPolicy %s (%s) would have %s on %s.\n", f.Policy, f.Plan, terminal.Count(f.GPUs, "GPU"), terminal.Count(nodes, "node"))
	for _, p := range slices.Sorted(maps.Keys(f.Lost)) {
		fmt.Fprintf(out, "%s that it selects would be under %s, which takes precedence.\n", terminal.Count(f.Lost[p], "GPU"), p)
	}
	var texts []string
	names := make(map[string][]string)
	for _, n := range f.Nodes {
		text := n.text()
		if names[text] == nil {
			texts = append(texts, text)
		}
		names[text] = append(names[text], n.Node)
	}
	for _, text := range texts {
		fmt.Fprintf(out, "%s\n%s", some(names[text], "nodes"), text)
	}
}

// some names the first few.
func some(names []string, what string) string {
	const few = 4
	if len(names) <= few {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s, … (%d %s)", strings.Join(names[:few], ", "), len(names), what)
}

func (n nodeForecast) text() string {
	var out strings.Builder
	var texts []string
	indexes := make(map[string][]string)
	for _, g := range n.GPUs {
		text := g.text()
		if indexes[text] == nil {
			texts = append(texts, text)
		}
		indexes[text] = append(indexes[text], fmt.Sprint(g.Index))
	}
	for _, text := range texts {
		word := "GPU"
		if len(indexes[text]) > 1 {
			word = "GPUs"
		}
		fmt.Fprintf(&out, "  %s %s%s", word, strings.Join(indexes[text], ", "), text)
	}
	return out.String()
}

// text describes a GPU, behind its index.
func (g gpuForecast) text() string {
	var out strings.Builder
	under := func(p string) string {
		if p == "" {
			return "no policy"
		}
		return p
	}
	fmt.Fprintf(&out, ": %s, ", g.Model)
	if g.Before == g.After {
		fmt.Fprintf(&out, "under %s as now\n", under(g.After))
	} else {
		fmt.Fprintf(&out, "now under %s, then under %s\n", under(g.Before), under(g.After))
	}
	line := func(sign string, all []kindCount) {
		var parts []string
		for _, c := range all {
			parts = append(parts, fmt.Sprintf("%d× %s", c.Count, c.Kind))
		}
		if len(parts) > 0 {
			fmt.Fprintf(&out, "    %s %s\n", sign, strings.Join(parts, ", "))
		}
	}
	line("+", g.Added)
	line("-", g.Removed)
	if len(g.Added)+len(g.Removed) == 0 {
		fmt.Fprintln(&out, "    the same devices as now")
	}
	if len(g.Leftovers) > 0 {
		fmt.Fprintf(&out, "    until these claims end, less than that is offered:\n")
	}
	for _, d := range g.Leftovers {
		fmt.Fprintf(&out, "      %s has %s\n", strings.Join(d.Claims, ", "), d.Device)
	}
	for _, p := range g.Problems {
		fmt.Fprintf(&out, "    problem: %s\n", p)
	}
	return out.String()
}
