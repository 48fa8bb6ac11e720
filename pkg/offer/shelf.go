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

// shelf is the offer of one GPU while it is being decided.
type shelf struct {
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
	// entire: such a share is the whole GPU for claims that don't say how large.
	entire bool
	// frozen: nothing but what claims have is offered.
	frozen bool
	// uncharged: the plan is cut back for the sake of GPU.Uncharged.
	uncharged bool
	missing   []string
	problems  []string
}

// How many devices a ResourceSlice has room for, with counters and without.
const (
	maxCounted   = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	maxUncounted = resourceapi.ResourceSliceMaxDevices
)

// newShelf decides the offer of a GPU by its plan, without devices of claims.
func newShelf(g gpu.GPU, p v1alpha1.Plan, server Server, tables error) *shelf {
	s := &shelf{g: g, server: server}
	if g.MIG != nil {
		s.mig = *g.MIG
	}
	s.whole = !s.mig.Enabled && len(s.mig.Instances) == 0
	if tables != nil {
		s.problem("It can't be cut, because its MIG tables, as the node's plugin reports them, make no sense: %v.", tables)
		s.mig, p.Partitioned = gpu.MIG{}, nil
	}
	s.room = newRoom(s.mig)
	s.offerExisting()
	switch {
	case p.MPS != nil:
		s.planMPS(withDefaults(*p.MPS))
	case p.TimeSliced != nil:
		s.planTimeSliced(*p.TimeSliced)
	case p.Partitioned != nil:
		s.planPartitioned(*p.Partitioned)
	case !s.whole && tables == nil:
		s.problem("It is exclusive by its plan, and can't be used whole because others have put it into MIG mode; only the MIG devices that exist are offered. " +
			"Destroy them and switch MIG mode off (nvidia-smi -mig 0), or plan it partitioned.")
	}
	return s
}

func withDefaults(plan v1alpha1.MPSPlan) v1alpha1.MPSPlan {
	spec := v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{MPS: plan.DeepCopy()}}
	spec.SetDefaults()
	return *spec.Plan.MPS
}

func (s *shelf) problem(format string, args ...any) {
	s.problems = append(s.problems, fmt.Sprintf(format, args...))
}

// charged reports whether a device that is given several times may consume
// counters.
func (s *shelf) charged() bool { return s.server.Charged || !s.server.Counters }

// unsafe adds a problem that the scheduler's version causes.
func (s *shelf) unsafe(consequence string) {
	s.uncharged = true
	s.problem("%s %s", allocator.Explain(s.server.Version), consequence)
}

// offerExisting offers others' instances as they are.
func (s *shelf) offerExisting() {
	for _, i := range s.mig.Instances {
		p, known := s.profile(i.Profile)
		switch {
		case i.UUID == "" || i.ComputeInstanceID == gpu.NoComputeInstance:
			s.problem("GPU instance %d (%s at slice %d), which others made, isn't offered: it is not one MIG device, but has no compute instance or several.",
				i.GPUInstanceID, i.Profile, i.Placement.Start)
		case !known || !slices.Contains(p.Placements, i.Placement):
			s.problem("GPU instance %d, which others made, isn't offered: the GPU lists no profile %q of %d slices at slice %d.",
				i.GPUInstanceID, i.Profile, i.Placement.Size, i.Placement.Start)
		default:
			s.parts = append(s.parts, part{Partition: s.at(p, i.Placement), profile: p, uuid: i.UUID, exists: true})
		}
	}
}

func (s *shelf) at(p gpu.Profile, at gpu.Placement) gpu.Partition {
	return gpu.Partition{GPU: s.g.UUID, Profile: p.Name, Placement: at}
}

func (s *shelf) profile(name string) (gpu.Profile, bool) {
	i := slices.IndexFunc(s.mig.Profiles, func(p gpu.Profile) bool { return p.Name == name })
	if i < 0 {
		return gpu.Profile{}, false
	}
	return s.mig.Profiles[i], true
}

// planPartitioned carries out a partitioned plan as far as the GPU and the server
// can.
func (s *shelf) planPartitioned(plan v1alpha1.PartitionedPlan) {
	if why := s.uncut(); why != "" {
		s.problem("%s", why)
		return
	}
	if len(plan.Layout) > 0 {
		s.planLayout(plan.Layout)
	} else if !s.onDemand(plan) {
		return
	}
	if plan.MPS != nil {
		s.divide(int(plan.MPS.Shares))
	}
}

// onDemand offers profiles wherever they fit, or says why it can't.
func (s *shelf) onDemand(plan v1alpha1.PartitionedPlan) bool {
	profiles := s.plannedProfiles(plan.Profiles)
	switch {
	case len(profiles) == 0:
		s.problem("It has none of the profiles %s (spec.plan.partitioned.profiles), and isn't partitioned; its profiles are %s.",
			cmp.Or(strings.Join(plan.Profiles, ", "), "that are offered by default"), s.profileNames())
		return false
	case !s.server.Counters:
		s.problem("The API server stores no shared counters (feature gate DRAPartitionableDevices), so that partitions can't be cut on demand; " +
			"only the whole GPU, or what others made of it, is offered. Fix a partitioning in spec.plan.partitioned.layout.")
		return false
	case plan.MPS != nil && !s.server.Multiple:
		s.problem("The API server stores no consumable capacity (feature gate DRAConsumableCapacity), so that partitions that are cut on demand can't be shared; " +
			"only the whole GPU, or what others made of it, is offered. Fix a partitioning in spec.plan.partitioned.layout, or leave out spec.plan.partitioned.mps.")
		return false
	case plan.MPS != nil && !s.charged():
		s.unsafe("Partitions that are cut on demand aren't shared; only the whole GPU, or what others made of it, is offered. " +
			"Fix a partitioning in spec.plan.partitioned.layout, or leave out spec.plan.partitioned.mps.")
		return false
	}
	for _, p := range profiles {
		for _, at := range p.Placements {
			if s.room.has(p, at) {
				s.parts = append(s.parts, part{Partition: s.at(p, at), profile: p})
			}
		}
	}
	return true
}

// uncut says why a GPU can't be cut; "" if it can.
func (s *shelf) uncut() string {
	switch {
	case s.g.MIG == nil:
		return "It has no MIG, and is offered whole."
	case s.mig.Enabled != s.mig.Pending:
		return fmt.Sprintf("Its MIG mode is %s and becomes %s with the next GPU reset; until then only what exists is offered.", onOff(s.mig.Enabled), onOff(s.mig.Pending))
	case !s.mig.Enabled && !s.mig.Switchable:
		return "Its MIG mode is off, and this driver can't switch it on: on Ampere that takes a GPU reset, and in a virtual machine only the host can switch it. " +
			"Switch it on with nvidia-smi -mig 1, and the GPU is offered in partitions; until then it is offered whole."
	case len(s.mig.Profiles) == 0:
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

func (s *shelf) profileNames() string {
	var names []string
	for _, p := range s.mig.Profiles {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

// plannedProfiles returns the profiles that a plan lists, or the default ones, in
// the order of NVML.
func (s *shelf) plannedProfiles(names []string) []gpu.Profile {
	if len(names) == 0 {
		return s.defaultProfiles()
	}
	for _, name := range names {
		if _, ok := s.profile(name); !ok && !slices.Contains(s.missing, name) {
			s.missing = append(s.missing, name)
		}
	}
	var out []gpu.Profile
	for _, p := range s.mig.Profiles {
		if slices.Contains(names, p.Name) {
			out = append(out, p)
		}
	}
	return out
}

// lists says whether the partition that a device is, or is of, is one that the
// GPU's tables have.
func (s *shelf) lists(d gpu.Device) bool {
	at, ok := gpu.Base(d).(gpu.Partition)
	if !ok {
		return true
	}
	p, ok := s.profile(at.Profile)
	return ok && slices.Contains(p.Placements, at.Placement)
}

// offer puts the devices in order and describes them. The whole GPU is before
// its parts, because it is the most usual claim, and costs the others nothing.
func (s *shelf) offer(n gpu.Node, name gpu.DeviceName, names *gpu.Names) GPU {
	out := GPU{UUID: s.g.UUID, Name: name, Index: s.g.Index, Missing: s.missing, Problems: s.problems, Uncharged: s.uncharged}
	parts := inOrder(s.mig, s.parts)
	entire := s.whole || s.wholeLeft
	var counters counters
	last := len(parts)
	switch {
	case !s.server.Counters || s.frozen:
	case len(s.slots) > 0:
		counters, last = countSlots(s.slots, entire), len(s.slots)
	default:
		counters = count(s.room, parts, entire)
	}
	out.Counters = counters.set(name)
	add := func(d resourceapi.Device, at int, leftover bool) {
		d.ConsumesCounters = counters.use(name, at)
		out.Devices = append(out.Devices, d)
		if leftover {
			// The scheduler is quicker than a withdrawal: as soon as the claim is gone,
			// whoever waits for such a device would be given it again.
			attributes(d.Attributes).string("type", typeLeftover)
			out.Leftover = append(out.Leftover, gpu.DeviceName(d.Name))
		}
	}
	if entire {
		add(describeWhole(n, s.g, name), last, s.wholeLeft)
	}
	for i, p := range parts {
		partName, _ := names.Name(p.device())
		add(s.describePart(n, p, partName), i, p.leftover)
	}
	for i, x := range s.slots {
		slotName, _ := names.Name(x.device)
		add(s.describeSlot(n, x.device, slotName), i, x.leftover)
	}
	return out
}

// describePart describes a partition, shared or not.
func (s *shelf) describePart(n gpu.Node, p part, name gpu.DeviceName) resourceapi.Device {
	if p.shared {
		return s.describeShared(n, p, name)
	}
	return describePartition(n, s.g, p, name)
}
