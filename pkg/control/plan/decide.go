package plan

import (
	"cmp"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
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

// Decision is the decision on one node, with the figures that follow from it. The zero value
// is the decision for a node of which nothing is to be published.
type Decision struct {
	decision.Decision
	Account Account
}

// Account is the summary of a decision that the planner remembers. Policies' statuses are
// made from it.
type Account struct {
	facts facts
	// Pool is the fingerprint of the slices that publish the offer; empty for none.
	Pool string
	// Settings are the policies' settings for the node's GPUs, by UUID.
	Settings []v1alpha1.GPUSpec
	// Blocked are the pool's devices whose taints keep new claims off them.
	Blocked []BlockedDevice
	GPUs    []GPU
	// offered counts the devices.
	offered map[offerKey]int
	// Withheld are the node's GPUs that new claims don't get, or only in part.
	Withheld []WithheldGPU
}

// BlockedDevice is a device with the taints that keep new claims off it.
type BlockedDevice struct {
	Name   string
	Taints []resourceapi.DeviceTaint
}

// WithheldGPU is a GPU that new claims don't get, or only in part, whatever its plan.
type WithheldGPU struct {
	GPU    string // device name or UUID
	Policy string // that selects it; empty: none
	Reason string
}

// leftovers lists the allocations of devices that are offered only because claims have them.
func (a Account) leftovers() []claims.Allocation {
	var out []claims.Allocation
	for _, g := range a.GPUs {
		out = append(out, g.Leftovers...)
	}
	return out
}

// problems lists the parts of plans that can't be carried out.
func (a Account) problems() []string {
	var out []string
	for _, g := range a.GPUs {
		out = append(out, g.Problems...)
		if g.WithoutWhole != "" {
			out = append(out, g.WithoutWhole)
		}
	}
	return out
}

// GPU is the decision about one GPU, with its leftovers and its problems.
type GPU struct {
	Name     gpu.DeviceName
	Devices  int // how many of it are offered
	Verdict  policy.Verdict
	Found    []string // profiles that the plan names and the GPU has
	Missing  []string // those that it hasn't, though it could be cut
	Problems []string
	// WithoutWhole is the reason why it isn't offered whole beside its shares.
	WithoutWhole string
	// Unsafe: the scheduler is among the problems.
	Unsafe    bool
	Leftovers []claims.Allocation
}

// facts are all that a decision follows from, in a form that compares.
type facts struct {
	inventory, labels, rules, claims string
	able                             publish.Abilities
	// turns is the sum of the turns of the conditions (gpu.TurnAt). While the inventory stays the
	// same none becomes less, so the sum differs if one does.
	turns int
}

// Input is everything that a decision depends on, besides the inventory.
type Input struct {
	facts    facts
	labels   labels.Set
	policies []policy.Policy
	claims   []claims.Allocation
	now      time.Time
}

// CommonInput is the part of an Input that all nodes have.
type CommonInput struct {
	Rules    *Rules
	policies []policy.Policy
	able     publish.Abilities
}

// decide computes what a node offers. It depends on its arguments alone.
func decide(inv *v1alpha1.GPUInventory, in Input) Decision {
	d := Decision{
		Decision: decision.Of(inv, decision.Input{
			Labels: in.labels, Policies: in.policies, Allocated: devicesOf(in.claims), Able: in.facts.able, Now: in.now,
		}),
		Account: Account{facts: in.facts, offered: map[offerKey]int{}},
	}
	for _, g := range d.GPUs {
		v, profiles := d.Verdicts[g.UUID], profilesOf(d.Node, g.UUID)
		d.Account.GPUs = append(d.Account.GPUs, accountFor(g, v, profiles, in.claims))
		for _, device := range g.Devices {
			d.Account.offered[offerKey{gpu.DeviceName(device.Name).Type(), v.Policy}]++
		}
	}
	for _, w := range d.Withheld() {
		d.Account.Withheld = append(d.Account.Withheld, WithheldGPU{
			GPU: cmp.Or(string(w.Name), string(w.UUID)), Policy: d.Verdicts[w.UUID].Policy, Reason: w.Reason,
		})
	}
	d.Account.Pool, d.Account.Settings, d.Account.Blocked = publish.Fingerprint(publish.Pointers(d.Pool)), settingsFor(d.Decision, inv), blockedDevices(d.Pool)
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

func blockedDevices(pool []resourceapi.ResourceSlice) []BlockedDevice {
	var out []BlockedDevice
	for _, s := range pool {
		for _, d := range s.Spec.Devices {
			if taints := offer.BlockingTaints(d); len(taints) > 0 {
				out = append(out, BlockedDevice{Name: d.Name, Taints: taints})
			}
		}
	}
	return out
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

func accountFor(g offer.GPU, v policy.Verdict, profiles []gpu.Profile, allocated []claims.Allocation) GPU {
	a := GPU{Name: g.Name, Devices: len(g.Devices), Verdict: v, Missing: g.Missing, Problems: g.Problems, WithoutWhole: g.WithoutWhole, Unsafe: g.Unsafe}
	for _, p := range profiles {
		if v.Plan.Partitioned != nil && slices.Contains(v.Plan.Partitioned.Profiles, p.Name) {
			a.Found = append(a.Found, p.Name)
		}
	}
	for _, c := range allocated {
		if slices.Contains(g.Leftover, c.Device) {
			a.Leftovers = append(a.Leftovers, c)
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

// UntilNextTurn returns how long it is until a device that claims could not be given is offered
// again: until then, the decision on the node stays as it is. 0: there is no such device.
func UntilNextTurn(inv *v1alpha1.GPUInventory, now time.Time) time.Duration {
	_, left := turns(inv, now)
	return left
}

// turns returns the sum of the turns of a node's conditions, and how long it stays so; 0: no
// condition has turns.
func turns(inv *v1alpha1.GPUInventory, now time.Time) (sum int, left time.Duration) {
	for _, g := range inv.Status.GPUs {
		for _, c := range g.Conditions {
			if c.RetryAt == nil {
				continue
			}
			turn, its := gpu.TurnAt(c.RetryAt.Time, now)
			sum += turn
			if left == 0 || its < left {
				left = its
			}
		}
	}
	return sum, left
}

// Publishable reports whether a node should have a pool: not without an
// inventory, while the inventory goes away, before the kubelet has registered
// the plugin, and where another driver serves the GPUs.
func Publishable(inv *v1alpha1.GPUInventory) bool {
	return inv != nil && inv.DeletionTimestamp == nil && !inv.Status.RegisteredAt.IsZero() &&
		!meta.IsStatusConditionTrue(inv.Status.Conditions, v1alpha1.ConditionConflicting)
}
