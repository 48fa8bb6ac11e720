package control

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// decision is the offer of one node.
type decision struct {
	gpus []offer.GPU
	// pool has the slices of the offer.
	pool []resourceapi.ResourceSlice
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
func (a nodeAccount) leftovers() []allocation {
	var out []allocation
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
	leftovers []allocation
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
	claims   []allocation
}

// commonInput is the part of a decisionInput that all nodes have.
type commonInput struct {
	version  string // of the rules
	policies []policy.Policy
	able     publish.Abilities
}

// decide computes what a node offers. It depends on its arguments alone.
func decide(inv *v1alpha1.GPUInventory, in decisionInput) decision {
	n := inventory.Node(inv)
	verdicts, plans := verdictsFor(n, in)
	for i := range n.GPUs {
		applyHealthPolicy(n.GPUs[i].Conditions, verdicts[n.GPUs[i].UUID].Health)
	}
	able := in.facts.able
	d := decision{account: nodeAccount{facts: in.facts, offered: map[offerKey]int{}}}
	d.gpus = offer.Build(n, plans, devicesOf(in.claims), serverFor(inv, able))
	for _, g := range d.gpus {
		v, profiles := verdicts[g.UUID], profilesOf(n, g.UUID)
		d.account.gpus = append(d.account.gpus, accountFor(g, v, profiles, in.claims))
		for _, device := range g.Devices {
			d.account.offered[offerKey{gpu.DeviceName(device.Name).Type(), v.Policy}]++
		}
	}
	d.settings = settingsFor(n, d.gpus, verdicts, inv)
	for _, w := range offer.Withheld(n, d.gpus) {
		d.account.withheld = append(d.account.withheld, withheldGPU{
			gpu: cmp.Or(string(w.Name), string(w.UUID)), policy: verdicts[w.UUID].Policy, reason: w.Reason,
		})
	}
	d.pool = publish.Pool(owner(inv), d.gpus, able.Counters)
	d.account.pool, d.account.settings, d.account.blocked = fingerprint(d.pool), d.settings, blockedDevices(d.pool)
	return d
}

// verdictsFor returns which policy each GPU is under, and its plan.
func verdictsFor(n gpu.Node, in decisionInput) (map[gpu.UUID]policy.Verdict, map[gpu.UUID]v1alpha1.Plan) {
	verdicts := make(map[gpu.UUID]policy.Verdict, len(n.GPUs))
	plans := make(map[gpu.UUID]v1alpha1.Plan, len(n.GPUs))
	for _, g := range n.GPUs {
		verdicts[g.UUID] = policy.Decide(in.policies, in.labels, offer.Whole(n, g))
		plans[g.UUID] = verdicts[g.UUID].Plan
	}
	return verdicts, plans
}

// applyHealthPolicy sets the effects that a policy gives to conditions.
func applyHealthPolicy(conditions []gpu.Condition, p v1alpha1.HealthPolicy) {
	gone := []gpu.ConditionType{gpu.Lost, gpu.BusResetRequired, gpu.RebootRequired}
	for i := range conditions {
		c := &conditions[i]
		if p.Evict && slices.Contains(gone, c.Type) {
			c.ByPolicy = gpu.NoExecute
		}
		if p.RowRemapPending == v1alpha1.NoSchedule && c.Type == gpu.RowRemapPending {
			c.ByPolicy = gpu.NoSchedule
		}
	}
}

// serverFor returns the abilities of server and scheduler that a node's offer may use.
func serverFor(inv *v1alpha1.GPUInventory, able publish.Abilities) offer.Server {
	s := able.ForOffers()
	if distrustsCounters(inv, able) {
		// A scheduler that doesn't know counters is as old as one that ignores taints.
		s.Counters, s.MaxTainted, s.Distrust = false, 0, distrustText(able)
	}
	return s
}

// owner returns the reference of the node's slices to their Node: the one that the
// inventory has. It has no UID if the inventory has none.
func owner(inv *v1alpha1.GPUInventory) metav1.OwnerReference {
	for _, o := range inv.OwnerReferences {
		if o.Kind == "Node" && o.APIVersion == corev1.SchemeGroupVersion.String() && o.Name == inv.Name {
			return metav1.OwnerReference{APIVersion: o.APIVersion, Kind: o.Kind, Name: o.Name, UID: o.UID, Controller: new(true)}
		}
	}
	return metav1.OwnerReference{Name: inv.Name}
}

// settingsFor returns the policies' settings for the node's GPUs, by UUID. A GPU that
// isn't offered because it needs a reset is among them.
func settingsFor(n gpu.Node, offered []offer.GPU, verdicts map[gpu.UUID]policy.Verdict, inv *v1alpha1.GPUInventory) []v1alpha1.GPUSpec {
	var all []v1alpha1.GPUSpec
	names := gpu.NameAll(n.GPUs)
	for _, g := range n.GPUs {
		if _, ok := names.Name(gpu.Whole{GPU: g.UUID}); !ok {
			continue // the settings are a list by UUID, and accept only those that identify a GPU
		}
		v, r := verdicts[g.UUID], v1alpha1.GPUSpec{UUID: string(g.UUID)}
		if i := slices.IndexFunc(offered, func(o offer.GPU) bool { return o.UUID == g.UUID }); i >= 0 {
			r.TimeSlice, r.KeepWarm = timeSlice(offered[i], v.Plan, inv), keepWarm(v.Plan, profilesOf(n, g.UUID))
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

func accountFor(g offer.GPU, v policy.Verdict, profiles []gpu.Profile, claims []allocation) gpuAccount {
	a := gpuAccount{name: g.Name, devices: len(g.Devices), verdict: v, missing: g.Missing, problems: g.Problems, withoutWhole: g.WithoutWhole, unsafe: g.Unsafe}
	for _, p := range profiles {
		if v.Plan.Partitioned != nil && slices.Contains(v.Plan.Partitioned.Profiles, p.Name) {
			a.found = append(a.found, p.Name)
		}
	}
	for _, c := range claims {
		if slices.Contains(g.Leftover, c.device) {
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

func devicesOf(claims []allocation) []gpu.DeviceName {
	out := make([]gpu.DeviceName, len(claims))
	for i, c := range claims {
		out[i] = c.device
	}
	return out
}
