package offer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
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
	// leftover: only a claim keeps it on offer.
	leftover bool
}

// shelf is what one GPU is offered as, while it is being decided.
type shelf struct {
	g gpu.GPU
	// mig is g's, or an empty one.
	mig gpu.MIG
	// room that others leave.
	room  room
	whole bool
	// wholeLeft: only a claim keeps the whole GPU on offer.
	wholeLeft bool
	parts     []part
	missing   []string
	problems  []string
}

// newShelf decides what a plan makes of a GPU that nobody has been given.
func newShelf(g gpu.GPU, p Plan, counters bool, tables error) *shelf {
	s := &shelf{g: g}
	if g.MIG != nil {
		s.mig = *g.MIG
	}
	if tables != nil {
		s.problem("It can't be cut, because its MIG tables, as the node's plugin reports them, make no sense: %v.", tables)
		s.whole = !s.mig.Enabled && len(s.mig.Instances) == 0
		s.mig, s.room = gpu.MIG{}, newRoom(gpu.MIG{})
		return s
	}
	s.room = newRoom(s.mig)
	s.existing()
	s.whole = !s.mig.Enabled && len(s.mig.Instances) == 0
	switch {
	case p.Partitioned != nil:
		s.partition(*p.Partitioned, counters)
	case !s.whole:
		s.problem("It is exclusive by its plan, and can't be used whole because others have put it into MIG mode; only the MIG devices that exist are offered. " +
			"Destroy them and switch MIG mode off (nvidia-smi -mig 0), or plan it partitioned.")
	}
	return s
}

func (s *shelf) problem(format string, args ...any) {
	s.problems = append(s.problems, fmt.Sprintf(format, args...))
}

// existing offers others' instances as they are.
func (s *shelf) existing() {
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

// partition carries out a partitioned plan as far as the GPU and the server
// can.
func (s *shelf) partition(plan v1alpha1.PartitionedPlan, counters bool) {
	if why := s.uncut(plan); why != "" {
		s.problem("%s", why)
		return
	}
	if len(plan.Layout) > 0 {
		s.layout(plan.Layout)
		return
	}
	profiles := s.wanted(plan.Profiles)
	if len(profiles) == 0 {
		s.problem("It has none of the profiles %s (spec.plan.partitioned.profiles), and isn't cut; it has %s.",
			cmp.Or(strings.Join(plan.Profiles, ", "), "that are offered by default"), s.profileNames())
		return
	}
	if !counters {
		s.problem("The API server stores no shared counters (feature gate DRAPartitionableDevices), so that partitions can't be cut on demand; " +
			"only the whole GPU, or what others made of it, is offered. Fix a partitioning in spec.plan.partitioned.layout.")
		return
	}
	for _, p := range profiles {
		for _, at := range p.Placements {
			if s.room.has(p, at) {
				s.parts = append(s.parts, part{Partition: s.at(p, at), profile: p})
			}
		}
	}
}

// uncut says why a GPU can't be cut; "" if it can.
func (s *shelf) uncut(plan v1alpha1.PartitionedPlan) string {
	switch {
	case s.g.MIG == nil:
		return "It has no MIG, and is offered whole."
	case plan.MPS != nil:
		return "This version makes no MPS shares of partitions (spec.plan.partitioned.mps), and doesn't cut the GPU."
	case s.mig.Enabled != s.mig.Pending:
		return fmt.Sprintf("Its MIG mode is %s and becomes %s with the next GPU reset; until then only what exists is offered.", onOff(s.mig.Enabled), onOff(s.mig.Pending))
	case !s.mig.Enabled && !s.mig.Switchable:
		return "Its MIG mode is off, and this driver can't switch it on: on Ampere that takes a GPU reset, and in a virtual machine it is the host's affair. " +
			"Switch it on by hand (nvidia-smi -mig 1), and the GPU is cut from then on; until then it is offered whole."
	case len(s.mig.Profiles) == 0:
		return "It lists no MIG profiles, and isn't cut."
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

// wanted are the profiles that a plan lists, or the default ones, in NVML's
// order.
func (s *shelf) wanted(names []string) []gpu.Profile {
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

// keep leaves on the shelf what claims have. Without counters, what couldn't
// exist beside it is taken off instead; and everything is, beside a partition
// of which nobody knows what it takes.
func (s *shelf) keep(names *gpu.Names, allocated []gpu.DeviceName, counters bool) {
	var have []gpu.Device
	var unknown []string
	for _, name := range allocated {
		d, err := names.Device(name)
		if p, ok := d.(gpu.Partition); err != nil || ok && !s.lists(p) {
			unknown = append(unknown, string(name))
			continue
		}
		have = append(have, d)
	}
	if !counters {
		s.withhold(have)
	}
	if len(unknown) > 0 {
		s.problem("Its MIG tables don't list %s, which a claim has; until the claim is gone, nothing new of it is offered.", strings.Join(unknown, ", "))
		s.whole = false
		s.parts = slices.DeleteFunc(s.parts, func(p part) bool { return !slices.Contains(have, gpu.Device(p.Partition)) })
	}
	for _, d := range have {
		switch d := d.(type) {
		case gpu.Whole:
			s.wholeLeft = !s.whole
		case gpu.Partition:
			if p, ok := s.profile(d.Profile); ok && !s.holds(d) {
				s.parts = append(s.parts, part{Partition: d, profile: p, leftover: true})
			}
		}
	}
}

// lists says whether a partition is one that the GPU's tables have.
func (s *shelf) lists(d gpu.Partition) bool {
	p, ok := s.profile(d.Profile)
	return ok && slices.Contains(p.Placements, d.Placement)
}

func (s *shelf) holds(d gpu.Partition) bool {
	return slices.ContainsFunc(s.parts, func(p part) bool { return p.Partition == d })
}

// exists says whether a partition is one that others made.
func (s *shelf) exists(d gpu.Partition) bool {
	return slices.ContainsFunc(s.parts, func(p part) bool { return p.Partition == d && p.exists })
}

// withhold takes off what overlaps with what claims have, or wants engines of
// which they leave too few.
func (s *shelf) withhold(allocated []gpu.Device) {
	s.whole = s.whole && !s.inTheWay(gpu.Whole{GPU: s.g.UUID}, allocated)
	s.parts = slices.DeleteFunc(s.parts, func(p part) bool { return s.inTheWay(p.Partition, allocated) })
	r := s.room
	for _, a := range allocated {
		if d, ok := a.(gpu.Partition); ok && !s.exists(d) {
			if p, ok := s.profile(d.Profile); ok {
				r = r.without(p, d.Placement)
			}
		}
	}
	s.parts = slices.DeleteFunc(s.parts, func(p part) bool {
		if p.exists || slices.Contains(allocated, gpu.Device(p.Partition)) {
			return false
		}
		if !r.has(p.profile, p.Placement) {
			return true
		}
		r = r.without(p.profile, p.Placement)
		return false
	})
}

func (s *shelf) inTheWay(d gpu.Device, allocated []gpu.Device) bool {
	return slices.ContainsFunc(allocated, func(a gpu.Device) bool { return a != d && gpu.Conflict(a, d) })
}

// offer puts the devices in order and describes them. The whole GPU is before
// its partitions, because it is the most usual claim, and costs the others
// nothing.
func (s *shelf) offer(n gpu.Node, name gpu.DeviceName, names *gpu.Names, withCounters bool) GPU {
	out := GPU{UUID: s.g.UUID, Name: name, Index: s.g.Index, Missing: s.missing, Problems: s.problems}
	parts := inOrder(s.mig, s.parts)
	var counters counters
	if withCounters {
		counters = count(s.room, parts, s.whole || s.wholeLeft)
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
	if s.whole || s.wholeLeft {
		add(whole(n, s.g, name), len(parts), s.wholeLeft)
	}
	for i, p := range parts {
		partName, _ := names.Name(p.Partition)
		add(partition(n, s.g, p, partName), i, p.leftover)
	}
	return out
}
