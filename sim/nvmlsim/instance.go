package nvmlsim

import (
	"os"
	"slices"
	"strings"
)

// Instance refers to one created GPU instance; a later one with the same id is
// a different instance. After the instance was destroyed its methods return
// NotFound.
type Instance struct {
	g    *GPU
	id   uint32
	born uint64
}

// SetMIGMode requests a MIG mode. activation is the result: Success, or the
// reason why the mode is pending. It is pending until a reset on Ampere, in a
// guest and on a GPU with MIGModePends (assumed: ResetRequired, NotSupported and
// ResetRequired), and while processes use the GPU (InUse). Turning it off while
// instances exist is an error, InUse.
func (g *GPU) SetMIGMode(on bool) (activation Return, err error) {
	if err := g.needMIG("DeviceSetMigMode"); err != nil {
		return Unknown, err
	}
	err = g.changeMIG(func(st *State, s *GPUState) error {
		if !on && len(s.Instances) > 0 {
			return InUse
		}
		s.MIGPending = on
		activation = g.activation(s, on)
		if activation == Success && s.MIGCurrent != on {
			s.MIGCurrent = on
			st.moveMinor(g.pos)
			st.addMIGEvent(g.pos, NoInstance, NoInstance)
		}
		return nil
	})
	return activation, err
}

func (g *GPU) activation(s *GPUState, on bool) Return {
	switch {
	case s.MIGCurrent == on:
		return Success
	case g.m.description.Virtualization == "passthrough":
		return NotSupported
	case g.model.MIG.ModeNeedsReset || s.MIGModePends:
		return ResetRequired
	case len(s.Processes) > 0:
		return InUse
	}
	return Success
}

// callReset is the call of a reset, for faults; it isn't one of NVML.
const callReset = "DeviceReset"

// Reset resets the GPU: a pending MIG mode takes effect, instances and modes
// are gone. It returns InUse while processes use the GPU.
func (g *GPU) Reset() error {
	if err := g.call(callReset); err != nil {
		return err
	}
	return g.changeMIG(func(st *State, s *GPUState) error {
		if len(s.Processes) > 0 {
			return InUse
		}
		fresh := bootGPU(g.id, g.model)
		fresh.MIGCurrent, fresh.MIGPending, fresh.Health = s.MIGPending, s.MIGPending, s.afterReset()
		fresh.Minor = s.Minor
		switched := s.MIGCurrent != fresh.MIGCurrent
		if switched || len(s.Instances) > 0 {
			st.addMIGEvent(g.pos, NoInstance, NoInstance)
		}
		*s = fresh
		if switched {
			st.moveMinor(g.pos)
		}
		return nil
	})
}

// moveMinor gives a GPU, by position, the lowest minor number that is free, where
// numbers move.
func (s *State) moveMinor(gpu int) {
	if !s.Description.MinorsMove {
		return
	}
	for _, minor := range s.Description.Minors() {
		if !slices.ContainsFunc(s.GPUs, func(g GPUState) bool { return g.Minor == minor }) {
			s.GPUs[gpu].Minor = minor
			return
		}
	}
}

// changeMIG changes the GPU, for callers with root's permission.
func (g *GPU) changeMIG(change func(*State, *GPUState) error) error {
	if os.Geteuid() != 0 {
		return NoPermission
	}
	return g.m.updateGPU(g.pos, change)
}

// CreateInstance creates a GPU instance of a profile (by id), at a start or,
// with nil, at one that the driver chooses. It returns InvalidArgument for a
// start that the profile doesn't have, InsufficientResources if there is no
// room.
func (g *GPU) CreateInstance(profileID uint32, start *uint32) (Instance, error) {
	call := "DeviceCreateGpuInstance"
	if start != nil {
		call = "DeviceCreateGpuInstanceWithPlacement"
	}
	if err := g.needMIGMode(call); err != nil {
		return Instance{}, err
	}
	p, err := g.profile(InvalidArgument, func(p Profile) bool { return p.ID == profileID })
	if err != nil {
		return Instance{}, err
	}
	if start != nil && !slices.Contains(p.Starts, *start) {
		return Instance{}, InvalidArgument
	}
	if err := g.meetInstance(call, p, start); err != nil {
		return Instance{}, err
	}
	made := Instance{g: g}
	err = g.changeMIG(func(st *State, s *GPUState) error {
		at, ok := g.place(p, start, s.Instances)
		if !ok || !s.MIGCurrent {
			return InsufficientResources
		}
		st.Births++
		made.id, made.born = instanceID(g.model.MIG.MemorySlices, at, p.Size), st.Births
		s.Instances = append(s.Instances, GPUInstance{ID: made.id, Born: made.born, Profile: p.ID, Start: at, Size: p.Size})
		slices.SortFunc(s.Instances, func(a, b GPUInstance) int { return int(a.ID) - int(b.ID) })
		st.addMIGEvent(g.pos, made.id, NoInstance)
		return nil
	})
	return made, err
}

// meetInstance applies the faults of a GPU instance that a call is about to create.
func (g *GPU) meetInstance(call string, p Profile, start *uint32) error {
	at, ok := g.place(p, start, g.state().Instances)
	if !ok {
		return nil
	}
	defer g.m.awaitChange(call, g.pos)()
	return g.m.meet(func(f Fault) bool { return f.meetsInstance(g.pos, p.Name, at) })
}

// instanceID returns the id that the hardware assigns to a GPU instance, as in
// a heap: the whole GPU is 0, its halves 1 and 2, and so on. It was compared
// with observed ids of A100, H100, A30 and RTX PRO 6000.
func instanceID(slices, start, size uint32) uint32 { return slices/size - 1 + start/size }

// InstanceIDs returns all ids that GPU instances of the product can have, in
// ascending order.
func (m *MIGModel) InstanceIDs() []uint32 {
	var ids []uint32
	for _, p := range m.Profiles {
		for _, start := range p.Starts {
			ids = append(ids, instanceID(m.MemorySlices, start, p.Size))
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// place returns the start for an instance of p, next to the existing ones.
func (g *GPU) place(p Profile, start *uint32, there []GPUInstance) (uint32, bool) {
	if !g.room(p, there) {
		return 0, false
	}
	starts := preferred(p, g.model.MIG.MemorySlices)
	if start != nil {
		starts = []uint32{*start}
	}
	for _, s := range starts {
		if free(s, p.Size, there) {
			return s, true
		}
	}
	return 0, false
}

// preferred returns a profile's starts in the order in which an H100's driver
// was seen to choose them (1g: 6, 4, 5, 0, 1, 2, 3; 2g first at 4): the second
// half first, and there a slice without a neighbour. This order is assumed for
// all products.
func preferred(p Profile, memorySlices uint32) []uint32 {
	starts := slices.Clone(p.Starts)
	rank := func(s uint32) uint32 {
		switch {
		case memorySlices == 8 && s == 6:
			return 0
		case s >= memorySlices/2:
			return 1
		}
		return 2
	}
	slices.SortStableFunc(starts, func(a, b uint32) int { return int(rank(a)) - int(rank(b)) })
	return starts
}

// room reports whether the GPU has the engines for another instance, and the
// profile allows another instance.
func (g *GPU) room(p Profile, there []GPUInstance) bool {
	same := uint32(0)
	used := p
	for _, i := range there {
		q, err := g.profile(Unknown, func(q Profile) bool { return q.ID == i.Profile })
		if err != nil {
			continue
		}
		if q.ID == p.ID {
			same++
		}
		used.DecoderCount += q.DecoderCount
		used.EncoderCount += q.EncoderCount
		used.JPEGCount += q.JPEGCount
		used.OFACount += q.OFACount
	}
	e := g.model.Engines
	return same < p.InstanceCount && used.DecoderCount <= e.Decoders && used.EncoderCount <= e.Encoders && used.JPEGCount <= e.JPEG && used.OFACount <= e.OFA
}

func free(start, size uint32, instances []GPUInstance) bool {
	for _, i := range instances {
		if start < i.Start+i.Size && i.Start < start+size {
			return false
		}
	}
	return true
}

// RemainingCapacity returns how many more instances of a profile (by id) fit
// now.
func (g *GPU) RemainingCapacity(profileID uint32) (int, error) {
	if err := g.needMIGMode("DeviceGetGpuInstanceRemainingCapacity"); err != nil {
		return 0, err
	}
	p, err := g.profile(InvalidArgument, func(p Profile) bool { return p.ID == profileID })
	if err != nil {
		return 0, err
	}
	there := slices.Clone(g.state().Instances)
	for n := 0; ; n++ {
		at, ok := g.place(p, nil, there)
		if !ok {
			return n, nil
		}
		there = append(there, GPUInstance{Profile: p.ID, Start: at, Size: p.Size})
	}
}

// Instances returns the instances of a profile (by id) that exist now and are
// visible here, ordered by id.
func (g *GPU) Instances(profileID uint32) ([]Instance, error) {
	if err := g.needMIGMode("DeviceGetGpuInstances"); err != nil {
		return nil, err
	}
	if _, err := g.profile(InvalidArgument, func(p Profile) bool { return p.ID == profileID }); err != nil {
		return nil, err
	}
	var found []Instance
	for _, i := range g.state().Instances {
		if i.Profile == profileID {
			found = append(found, Instance{g: g, id: i.ID, born: i.Born})
		}
	}
	return found, nil
}

// InstanceByID finds a GPU instance; NotFound if none has this id.
func (g *GPU) InstanceByID(id uint32) (Instance, error) {
	if err := g.needMIGMode("DeviceGetGpuInstanceById"); err != nil {
		return Instance{}, err
	}
	for _, i := range g.state().Instances {
		if i.ID == id {
			return Instance{g: g, id: i.ID, born: i.Born}, nil
		}
	}
	return Instance{}, NotFound
}

// GPU returns the GPU that contains the instance.
func (i Instance) GPU() *GPU { return i.g }

func (i Instance) find(s *GPUState) *GPUInstance {
	for n := range s.Instances {
		if s.Instances[n].ID == i.id && s.Instances[n].Born == i.born {
			return &s.Instances[n]
		}
	}
	return nil
}

// get returns the current state of the instance, for a call.
func (i Instance) get(call string) (GPUInstance, error) {
	if err := i.g.call(call); err != nil {
		return GPUInstance{}, err
	}
	s := i.g.state()
	if found := i.find(&s); found != nil {
		return *found, nil
	}
	return GPUInstance{}, NotFound
}

// Info returns the current state of the instance.
func (i Instance) Info() (GPUInstance, error) { return i.get("GpuInstanceGetInfo") }

// Destroy destroys the instance. It returns InUse while it has compute
// instances, and while this session has a sample of its performance counters
// (assumed: monitors are known to hold instances).
func (i Instance) Destroy() error {
	if _, err := i.get("GpuInstanceDestroy"); err != nil {
		return err
	}
	if i.g.m.gpm.sampled(i) {
		return InUse
	}
	return i.g.changeMIG(func(st *State, s *GPUState) error {
		found := i.find(s)
		if found == nil {
			return NotFound
		}
		if len(found.Compute) > 0 {
			return InUse
		}
		s.Instances = slices.DeleteFunc(s.Instances, func(x GPUInstance) bool { return x.Born == i.born })
		st.addMIGEvent(i.g.pos, i.id, NoInstance)
		return nil
	})
}

// profile returns the profile of the instance.
func (i Instance) profile(gi GPUInstance) Profile {
	p, err := i.g.profile(Unknown, func(p Profile) bool { return p.ID == gi.Profile })
	if err != nil {
		return Profile{} // the model has changed since the state was written
	}
	return p
}

// graphics reports whether a profile offers graphics APIs.
func (p Profile) graphics() bool { return strings.HasSuffix(p.Name, "+gfx") }

// Capabilities returns the bit set of nvmlGpuInstanceProfileInfo_v3_t.
func (p Profile) Capabilities() uint32 {
	var c uint32
	if p.P2P {
		c |= 1
	}
	if p.graphics() {
		c |= 2
	}
	return c
}
