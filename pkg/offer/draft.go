package offer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// part is a partition that is offered.
type part struct {
	gpu.Partition
	profile gpu.Profile
	// uuid of an instance that others made; empty where it is made on demand.
	uuid gpu.UUID
	// exists: others made it.
	exists bool
	// shared: several claims can have an MPS share of it. shares is how many there
	// are; 0 where only a claim keeps it on offer.
	shared bool
	shares int
	// leftover: only a claim keeps it on offer.
	leftover bool
}

// device returns the device for claims.
func (p part) device() gpu.Device {
	if p.shared {
		return gpu.Share{Of: p.Partition}
	}
	return p.Partition
}

// draft is the offer of one GPU while it is being decided.
type draft struct {
	g gpu.GPU
	// mig is g's, or an empty one.
	mig    gpu.MIG
	server Server
	// room that others leave.
	room  room
	whole bool
	// wholeLeft: only a claim keeps the whole GPU on offer.
	wholeLeft bool
	parts     []part
	// slots are shares of the GPU, or of partitions that don't overlap, or replicas.
	// Where a plan has some, it has no parts.
	slots []slot
	// step in MiB and number of clients of a share whose size claims choose; 0
	// where the plan has none.
	step    int64
	clients int
	// servesGPUClass: such a share is the whole GPU for claims that don't say how large.
	servesGPUClass bool
	// frozen: nothing but what claims have is offered.
	frozen bool
	// unsafe: the plan is reduced because of GPU.Unsafe.
	unsafe bool
	// withoutWhole is the reason why the whole GPU isn't offered beside its shares.
	withoutWhole string
	missing      []string
	problems     []string
}

// How many devices a ResourceSlice has room for, with counters and without.
const (
	maxCounted   = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	maxUncounted = resourceapi.ResourceSliceMaxDevices
)

// newDraft decides the offer of a GPU by its plan, without devices of claims.
func newDraft(g gpu.GPU, p v1alpha1.Plan, server Server, tables error) *draft {
	o := &draft{g: g, server: server}
	if g.MIG != nil {
		o.mig = *g.MIG
	}
	o.whole = !o.mig.Enabled && len(o.mig.Instances) == 0
	if tables != nil {
		o.problem("It can't be cut, because its MIG tables, as the node's plugin reports them, make no sense: %v.", tables)
		o.mig, p.Partitioned = gpu.MIG{}, nil
	}
	o.room = newRoom(o.mig)
	o.offerExisting()
	switch {
	case p.MPS != nil:
		o.planMPS(withDefaults(*p.MPS))
	case p.TimeSliced != nil:
		o.planTimeSliced(*p.TimeSliced)
	case p.Partitioned != nil:
		o.planPartitioned(*p.Partitioned)
	case !o.whole && tables == nil:
		o.problem("It is exclusive by its plan, and can't be used whole because others have put it into MIG mode; only the MIG devices that exist are offered. " +
			"Destroy them and switch MIG mode off (nvidia-smi -mig 0), or plan it partitioned.")
	}
	return o
}

func withDefaults(plan v1alpha1.MPSPlan) v1alpha1.MPSPlan {
	spec := v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{MPS: plan.DeepCopy()}}
	spec.SetDefaults()
	return *spec.Plan.MPS
}

func (o *draft) problem(format string, args ...any) {
	o.problems = append(o.problems, fmt.Sprintf(format, args...))
}

// charged reports whether a device that is allocated several times may consume
// counters.
func (o *draft) charged() bool { return o.server.Charged || !o.server.Counters }

// reportUncharged adds a problem that the scheduler's version causes.
func (o *draft) reportUncharged(consequence string) {
	o.unsafe = true
	o.problem("%s", o.explainUncharged(consequence))
}

func (o *draft) explainUncharged(consequence string) string {
	return allocator.Explain(o.server.Version) + " " + consequence
}

// reportNoCounters and reportNoMultiple add a problem that follows from a missing
// ability of the server, or from one of which nothing is known.
func (o *draft) reportNoCounters(consequence string) {
	o.unsafe = o.unsafe || o.server.Distrust != ""
	o.problem("%s", o.explainNoCounters(consequence))
}

func (o *draft) explainNoCounters(consequence string) string {
	if why := o.server.Distrust; why != "" {
		return why + " Until then " + consequence
	}
	return explainMissing("shared counters (feature gate DRAPartitionableDevices)", o.server.CountersDoubt, consequence)
}

func (o *draft) reportNoMultiple(consequence string) {
	if v := o.server.Version; !allocator.CountsCapacity(v) {
		o.problem("%s; until then %s", allocator.ExplainCapacity(v), consequence)
		return
	}
	o.problem("%s", explainMissing("consumable capacity (feature gate DRAConsumableCapacity)", o.server.MultipleDoubt, consequence))
}

func explainMissing(field, doubt, consequence string) string {
	if doubt == "" {
		return fmt.Sprintf("The API server stores no %s, so that %s", field, consequence)
	}
	return fmt.Sprintf("It isn't known whether the API server stores %s, so that %s %s", field, consequence, doubt)
}

// offerExisting offers others' instances as they are.
func (o *draft) offerExisting() {
	for _, i := range o.mig.Instances {
		p, known := o.profileNamed(i.Profile)
		switch {
		case i.UUID == "" || i.ComputeInstanceID == gpu.NoComputeInstance:
			o.problem("GPU instance %d (%s at slice %d), which others made, isn't offered: it is not one MIG device, but has no compute instance or several.",
				i.GPUInstanceID, i.Profile, i.Placement.Start)
		case !known || !slices.Contains(p.Placements, i.Placement):
			o.problem("GPU instance %d, which others made, isn't offered: the GPU lists no profile %q of %d slices at slice %d.",
				i.GPUInstanceID, i.Profile, i.Placement.Size, i.Placement.Start)
		default:
			o.parts = append(o.parts, part{Partition: o.partitionAt(p, i.Placement), profile: p, uuid: i.UUID, exists: true})
		}
	}
}

func (o *draft) partitionAt(p gpu.Profile, at gpu.Placement) gpu.Partition {
	return gpu.Partition{GPU: o.g.UUID, Profile: p.Name, Placement: at}
}

func (o *draft) profileNamed(name string) (gpu.Profile, bool) {
	i := slices.IndexFunc(o.mig.Profiles, func(p gpu.Profile) bool { return p.Name == name })
	if i < 0 {
		return gpu.Profile{}, false
	}
	return o.mig.Profiles[i], true
}

// planPartitioned carries out a partitioned plan as far as the GPU and the server
// can.
func (o *draft) planPartitioned(plan v1alpha1.PartitionedPlan) {
	if why := o.whyNotPartitionable(); why != "" {
		o.problem("%s", why)
		return
	}
	if len(plan.Layout) > 0 {
		o.planLayout(plan.Layout)
	} else if !o.onDemand(plan) {
		return
	}
	if plan.MPS != nil {
		o.divide(int(plan.MPS.Shares))
	}
}

// onDemand offers profiles wherever they fit, or says why it can't.
func (o *draft) onDemand(plan v1alpha1.PartitionedPlan) bool {
	profiles := o.plannedProfiles(plan.Profiles)
	switch {
	case len(profiles) == 0:
		o.problem("It has none of the profiles %s (spec.plan.partitioned.profiles), and isn't partitioned; its profiles are %s.",
			cmp.Or(strings.Join(plan.Profiles, ", "), "that are offered by default"), o.profileNames())
		return false
	case !o.server.Counters:
		o.reportNoCounters("partitions can't be cut on demand; only the whole GPU, or what others made of it, is offered. " +
			"Fix a partitioning in spec.plan.partitioned.layout.")
		return false
	case plan.MPS != nil && !o.server.Multiple:
		o.reportNoMultiple("partitions that are cut on demand can't be shared; only the whole GPU, or what others made of it, is offered. " +
			"Fix a partitioning in spec.plan.partitioned.layout, or leave out spec.plan.partitioned.mps.")
		return false
	case plan.MPS != nil && !o.charged():
		o.reportUncharged("Partitions that are cut on demand aren't shared; only the whole GPU, or what others made of it, is offered. " +
			"Fix a partitioning in spec.plan.partitioned.layout, or leave out spec.plan.partitioned.mps.")
		return false
	}
	for _, p := range profiles {
		for _, at := range p.Placements {
			if o.room.has(p, at) {
				o.parts = append(o.parts, part{Partition: o.partitionAt(p, at), profile: p})
			}
		}
	}
	return true
}

// whyNotPartitionable says why a GPU can't be cut; "" if it can.
func (o *draft) whyNotPartitionable() string {
	switch {
	case o.g.MIG == nil:
		return "It has no MIG, and is offered whole."
	case o.mig.Enabled != o.mig.Pending:
		return fmt.Sprintf("Its MIG mode is %s and becomes %s with the next GPU reset; until then only what exists is offered.", onOff(o.mig.Enabled), onOff(o.mig.Pending))
	case !o.mig.Enabled && !o.mig.Switchable:
		return "Its MIG mode is off, and this driver can't switch it on: on Ampere that takes a GPU reset, and in a virtual machine only the host can switch it. " +
			"Switch it on with nvidia-smi -mig 1, and the GPU is offered in partitions; until then it is offered whole."
	case len(o.mig.Profiles) == 0:
		return "It lists no MIG profiles, and isn't partitioned."
	}
	return ""
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

func (o *draft) profileNames() string {
	var names []string
	for _, p := range o.mig.Profiles {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

// plannedProfiles returns the profiles that a plan lists, or the default ones, in
// the order of NVML.
func (o *draft) plannedProfiles(names []string) []gpu.Profile {
	if len(names) == 0 {
		return o.defaultProfiles()
	}
	for _, name := range names {
		if _, ok := o.profileNamed(name); !ok && !slices.Contains(o.missing, name) {
			o.missing = append(o.missing, name)
		}
	}
	var out []gpu.Profile
	for _, p := range o.mig.Profiles {
		if slices.Contains(names, p.Name) {
			out = append(out, p)
		}
	}
	return out
}

// isListed reports whether the partition that a device is, or is of, is one that the
// GPU's tables have.
func (o *draft) isListed(d gpu.Device) bool {
	at, ok := gpu.Base(d).(gpu.Partition)
	if !ok {
		return true
	}
	p, ok := o.profileNamed(at.Profile)
	return ok && slices.Contains(p.Placements, at.Placement)
}

// describeAll puts the devices in order and describes them. The whole GPU is before
// its parts, because it is the most usual claim, and costs the others nothing.
func (o *draft) describeAll(n gpu.Node, name gpu.DeviceName, setName string, names *gpu.Names, a *arrangement) GPU {
	out := GPU{UUID: o.g.UUID, Name: name, Index: o.g.Index, Missing: o.missing, Problems: o.problems, Unsafe: o.unsafe, WithoutWhole: o.withoutWhole}
	parts, counters := inThatOrder(o.parts, a.order), a.counters
	last := len(parts)
	if o.server.Counters && !o.frozen && len(o.slots) > 0 {
		counters, last = o.countSlots(), len(o.slots)
	}
	out.Counters = counters.set(setName)
	add := func(d resourceapi.Device, at int, leftover bool) {
		d.ConsumesCounters = counters.use(setName, at)
		out.Devices = append(out.Devices, d)
		if leftover {
			// The scheduler is quicker than a withdrawal: as soon as the claim is gone,
			// a pod that waits for such a device would be given it.
			attributes(d.Attributes).string("type", typeLeftover)
			out.Leftover = append(out.Leftover, gpu.DeviceName(d.Name))
		}
	}
	if o.entire() {
		add(describeWhole(n, o.g, name), last, o.wholeLeft)
	}
	for i, p := range parts {
		partName, _ := names.Name(p.device())
		add(o.describePart(n, p, partName), i, p.leftover)
	}
	for i, x := range o.slots {
		slotName, _ := names.Name(x.device)
		add(o.describeSlot(n, x.device, slotName), i, x.leftover)
	}
	return out
}

// entire reports whether the whole GPU is offered.
func (o *draft) entire() bool { return o.whole || o.wholeLeft }

// describePart describes a partition, shared or not.
func (o *draft) describePart(n gpu.Node, p part, name gpu.DeviceName) resourceapi.Device {
	if p.shared {
		return o.describeShared(n, p, name)
	}
	return describePartition(n, o.g, p, name)
}
