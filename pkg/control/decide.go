package control

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/decision"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// nodeDecision is the decision on one node, with the settings and figures that follow from it.
type nodeDecision struct {
	decision.Decision
	// settings are the policies' settings for the node's GPUs, by UUID.
	settings []v1alpha1.GPUSpec
	account  nodeAccount
}

// nodeAccount is a decision as policies' statuses need it.
type nodeAccount struct {
	facts decisionFacts
	// pool is the fingerprint of the slices that say so; empty for none.
	pool     string
	settings []v1alpha1.GPUSpec
	// blocked are the pool's devices whose taints keep new claims off them.
	blocked []blockedDevice
	gpus    []gpuAccount
	// offered counts the devices.
	offered map[offerKey]int
	// withheld are the node's GPUs that new claims don't get, or only in part.
	withheld []withheldGPU
}

// withheldGPU is a GPU that new claims don't get, or only in part, whatever its plan.
type withheldGPU struct {
	gpu    string // device name or UUID
	policy string // that selects it; empty: none
	reason string
}

// leftovers lists the allocations of devices that are offered only because claims
// have them.
func (a nodeAccount) leftovers() []claims.Allocation {
	var out []claims.Allocation
	for _, g := range a.gpus {
		out = append(out, g.leftovers...)
	}
	return out
}

func (a nodeAccount) problems() []string {
	var out []string
	for _, g := range a.gpus {
		out = append(out, g.problems...)
		if g.withoutWhole != "" {
			out = append(out, g.withoutWhole)
		}
	}
	return out
}

// gpuAccount is the decision about one GPU, with its leftovers and its
// problems.
type gpuAccount struct {
	name     gpu.DeviceName
	devices  int // how many of it are offered
	verdict  policy.Verdict
	found    []string // profiles that the plan names and the GPU has
	missing  []string // those that it hasn't, though it could be cut
	problems []string
	// withoutWhole is the reason why it isn't offered whole beside its shares.
	withoutWhole string
	// unsafe: the scheduler is among the problems.
	unsafe    bool
	leftovers []claims.Allocation
}

// decisionFacts are all that a decision follows from, in a form that compares.
type decisionFacts struct {
	inventory, labels, rules, claims string
	able                             publish.Abilities
}

// decisionInput is everything that a decision depends on, besides the inventory.
type decisionInput struct {
	facts    decisionFacts
	labels   labels.Set
	policies []policy.Policy
	claims   []claims.Allocation
}

// commonInput is the part of a decisionInput that all nodes have.
type commonInput struct {
	version  string // of the rules
	policies []policy.Policy
	able     publish.Abilities
}

// decide computes what a node offers. It depends on its arguments alone.
func decide(inv *v1alpha1.GPUInventory, in decisionInput) nodeDecision {
	d := nodeDecision{
		Decision: decision.Of(inv, decision.Input{
			Labels: in.labels, Policies: in.policies, Allocated: devicesOf(in.claims), Able: in.facts.able,
		}),
		account: nodeAccount{facts: in.facts, offered: map[offerKey]int{}},
	}
	for _, g := range d.GPUs {
		v, profiles := d.Verdicts[g.UUID], profilesOf(d.Node, g.UUID)
		d.account.gpus = append(d.account.gpus, accountFor(g, v, profiles, in.claims))
		for _, device := range g.Devices {
			d.account.offered[offerKey{gpu.DeviceName(device.Name).Type(), v.Policy}]++
		}
	}
	for _, w := range d.Withheld() {
		d.account.withheld = append(d.account.withheld, withheldGPU{
			gpu: cmp.Or(string(w.Name), string(w.UUID)), policy: d.Verdicts[w.UUID].Policy, reason: w.Reason,
		})
	}
	d.settings = settingsFor(d.Decision, inv)
	d.account.pool, d.account.settings, d.account.blocked = fingerprint(d.Pool), d.settings, blockedDevices(d.Pool)
	return d
}

// settingsFor returns the policies' settings for the node's GPUs, by UUID. A GPU that
// isn't offered because it needs a reset is among them.
func settingsFor(d decision.Decision, inv *v1alpha1.GPUInventory) []v1alpha1.GPUSpec {
	var all []v1alpha1.GPUSpec
	names := gpu.NameAll(d.Node.GPUs)
	for _, g := range d.Node.GPUs {
		if _, ok := names.Name(gpu.Whole{GPU: g.UUID}); !ok {
			continue // the settings are a list by UUID, and accept only those that identify a GPU
		}
		v, r := d.Verdicts[g.UUID], v1alpha1.GPUSpec{UUID: string(g.UUID)}
		if o, ok := d.Offer(g.UUID); ok {
			r.TimeSlice, r.KeepWarm = timeSlice(o, v.Plan, inv), keepWarm(v.Plan, profilesOf(d.Node, g.UUID))
		}
		if v.Health.Reset == v1alpha1.ResetWhenIdle {
			r.Reset = v.Health.Reset
		}
		if r != (v1alpha1.GPUSpec{UUID: r.UUID}) {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b v1alpha1.GPUSpec) int { return cmp.Compare(a.UUID, b.UUID) })
	return all
}

// keepWarm returns how long the plan keeps idle partitions of a GPU with these profiles.
func keepWarm(plan v1alpha1.Plan, profiles []gpu.Profile) *metav1.Duration {
	if p := plan.Partitioned; p != nil && p.KeepWarm != nil && p.KeepWarm.Duration > 0 && len(profiles) > 0 {
		return p.KeepWarm
	}
	return nil
}

func fingerprint(pool []resourceapi.ResourceSlice) string {
	all := make([]*resourceapi.ResourceSlice, len(pool))
	for i := range pool {
		all[i] = &pool[i]
	}
	return publish.Fingerprint(all)
}

// timeSlice returns the time slice for a GPU while claims have replicas of it.
// A policy's interval stays until the last of its replicas is gone.
func timeSlice(g offer.GPU, plan v1alpha1.Plan, inv *v1alpha1.GPUInventory) v1alpha1.TimeSliceInterval {
	if plan.TimeSliced != nil && slices.ContainsFunc(g.Devices, func(d resourceapi.Device) bool { return gpu.DeviceName(d.Name).IsReplica() }) {
		return cmp.Or(plan.TimeSliced.Interval, v1alpha1.DefaultTimeSlice)
	}
	i := slices.IndexFunc(inv.Spec.GPUs, func(s v1alpha1.GPUSpec) bool { return s.UUID == string(g.UUID) })
	if i < 0 || !slices.ContainsFunc(g.Leftover, gpu.DeviceName.IsReplica) {
		return ""
	}
	return inv.Spec.GPUs[i].TimeSlice
}

func accountFor(g offer.GPU, v policy.Verdict, profiles []gpu.Profile, allocated []claims.Allocation) gpuAccount {
	a := gpuAccount{name: g.Name, devices: len(g.Devices), verdict: v, missing: g.Missing, problems: g.Problems, withoutWhole: g.WithoutWhole, unsafe: g.Unsafe}
	for _, p := range profiles {
		if v.Plan.Partitioned != nil && slices.Contains(v.Plan.Partitioned.Profiles, p.Name) {
			a.found = append(a.found, p.Name)
		}
	}
	for _, c := range allocated {
		if slices.Contains(g.Leftover, c.Device) {
			a.leftovers = append(a.leftovers, c)
		}
	}
	return a
}

// profilesOf a GPU that can be cut; none of another.
func profilesOf(n gpu.Node, uuid gpu.UUID) []gpu.Profile {
	i := slices.IndexFunc(n.GPUs, func(g gpu.GPU) bool { return g.UUID == uuid })
	if i < 0 || n.GPUs[i].MIG == nil {
		return nil
	}
	return n.GPUs[i].MIG.Profiles
}

func devicesOf(allocated []claims.Allocation) []gpu.DeviceName {
	out := make([]gpu.DeviceName, len(allocated))
	for i, a := range allocated {
		out[i] = a.Device
	}
	return out
}
