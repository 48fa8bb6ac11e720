package nvmlsim

import (
	"crypto/sha1" //nolint:gosec // version 5 UUIDs are made by it
	"fmt"
	"slices"
	"strings"
)

// Compute refers to one compute instance, as Instance does to a GPU instance. A
// compute instance and its GPU instance are a MIG device.
type Compute struct {
	in   Instance
	id   uint32
	born uint64
}

// ComputeProfile is nvmlComputeInstanceProfileInfo: one way to divide a GPU
// instance. All compute instances share the engines of the GPU instance.
type ComputeProfile struct {
	// ID equals the enum.
	ID                  uint32
	SliceCount          uint32
	InstanceCount       uint32
	MultiprocessorCount uint32
	// Parent is the GPU instance's profile.
	Parent Profile
}

// computeProfiles returns the compute instance profiles of GPU instances of
// profile p. By go-nvlib's rule, c of g slices is a profile if c equals g or 2c
// ≤ g+1. A profile of c slices has the multiprocessors of c one-slice instances
// (seen on A30 and B300, assumed for others). A GPU instance of one slice that has
// more multiprocessors, because it has double memory, has a second profile of one
// slice, with id 7 and all of them (seen on H100 and B300: dra-driver-nvidia-gpu#1454);
// one that doesn't have more, as on A100, has no such profile (go-nvlib#102).
func (g *GPU) computeProfiles(p Profile) []ComputeProfile {
	one := p.MultiprocessorCount
	for _, q := range g.model.MIG.Profiles {
		if q.SliceCount == 1 {
			one = min(one, q.MultiprocessorCount)
		}
	}
	var all []ComputeProfile
	for enum, c := range []uint32{1, 2, 3, 4, 7} {
		if c > p.SliceCount || (c < p.SliceCount && 2*c > p.SliceCount+1) {
			continue
		}
		profile := ComputeProfile{ID: uint32(enum), SliceCount: c, InstanceCount: p.SliceCount / c, MultiprocessorCount: min(c*one, p.MultiprocessorCount), Parent: p}
		if c == p.SliceCount && c > 1 {
			profile.MultiprocessorCount = p.MultiprocessorCount
		}
		all = append(all, profile)
	}
	if p.SliceCount == 1 && p.MultiprocessorCount > one {
		const oneSliceRevision1 = 7
		all = append(all, ComputeProfile{ID: oneSliceRevision1, SliceCount: 1, InstanceCount: 1, MultiprocessorCount: p.MultiprocessorCount, Parent: p})
	}
	return all
}

// isWhole reports whether an instance of the profile takes all of its GPU instance.
func (p ComputeProfile) isWhole() bool {
	return p.SliceCount == p.Parent.SliceCount && p.MultiprocessorCount == p.Parent.MultiprocessorCount
}

// ComputeProfile finds a compute instance profile by its enum, which is its id.
// It returns NotSupported if the instance doesn't have it.
func (i Instance) ComputeProfile(enum uint32) (ComputeProfile, error) {
	gi, err := i.get("GpuInstanceGetComputeInstanceProfileInfo")
	if err != nil {
		return ComputeProfile{}, err
	}
	const enums = 9
	if enum >= enums {
		return ComputeProfile{}, InvalidArgument
	}
	return i.computeProfile(gi, enum, NotSupported)
}

func (i Instance) computeProfile(gi GPUInstance, id uint32, missing Return) (ComputeProfile, error) {
	for _, p := range i.g.computeProfiles(i.profile(gi)) {
		if p.ID == id {
			return p, nil
		}
	}
	return ComputeProfile{}, missing
}

// starts returns the possible starts of a compute instance profile within its
// GPU instance, in slices.
func (p ComputeProfile) starts() []uint32 {
	all := make([]uint32, p.InstanceCount)
	for n := range all {
		all[n] = uint32(n) * p.SliceCount
	}
	return all
}

// ComputePlacements returns the placements of a compute instance profile (by
// id): starts and one size.
func (i Instance) ComputePlacements(profileID uint32) (starts []uint32, size uint32, err error) {
	gi, err := i.get("GpuInstanceGetComputeInstancePossiblePlacements")
	if err != nil {
		return nil, 0, err
	}
	p, err := i.computeProfile(gi, profileID, InvalidArgument)
	return p.starts(), p.SliceCount, err
}

// ComputeCapacity returns how many more compute instances of a profile (by id)
// fit.
func (i Instance) ComputeCapacity(profileID uint32) (int, error) {
	gi, err := i.get("GpuInstanceGetComputeInstanceRemainingCapacity")
	if err != nil {
		return 0, err
	}
	p, err := i.computeProfile(gi, profileID, InvalidArgument)
	if err != nil {
		return 0, err
	}
	n := 0
	for _, s := range p.starts() {
		if freeCompute(s, p.SliceCount, gi.Compute) {
			n++
		}
	}
	return n, nil
}

func freeCompute(start, size uint32, there []ComputeInstance) bool {
	for _, c := range there {
		if start < c.Start+c.Size && c.Start < start+size {
			return false
		}
	}
	return true
}

// CreateCompute creates a compute instance of a profile (by id), at a start or,
// with nil, at the first free one. It returns the errors of CreateInstance.
func (i Instance) CreateCompute(profileID uint32, start *uint32) (Compute, error) {
	call := "GpuInstanceCreateComputeInstance"
	if start != nil {
		call = "GpuInstanceCreateComputeInstanceWithPlacement"
	}
	gi, err := i.get(call)
	if err != nil {
		return Compute{}, err
	}
	p, err := i.computeProfile(gi, profileID, InvalidArgument)
	if err != nil {
		return Compute{}, err
	}
	starts := p.starts()
	if start != nil {
		if !slices.Contains(starts, *start) {
			return Compute{}, InvalidArgument
		}
		starts = []uint32{*start}
	}
	made := Compute{in: i}
	err = i.g.changeMIG(func(st *State, s *GPUState) error {
		found := i.find(s)
		if found == nil {
			return NotFound
		}
		at := slices.IndexFunc(starts, func(x uint32) bool { return freeCompute(x, p.SliceCount, found.Compute) })
		if at < 0 {
			return InsufficientResources
		}
		st.Births++
		made.id, made.born = freeID(found.Compute), st.Births
		found.Compute = append(found.Compute, ComputeInstance{ID: made.id, Born: made.born, Profile: p.ID, Start: starts[at], Size: p.SliceCount})
		slices.SortFunc(found.Compute, func(a, b ComputeInstance) int { return int(a.ID) - int(b.ID) })
		st.addMIGEvent(i.g.pos, i.id, made.id)
		return nil
	})
	return made, err
}

func freeID(there []ComputeInstance) uint32 {
	id := uint32(0)
	for slices.ContainsFunc(there, func(c ComputeInstance) bool { return c.ID == id }) {
		id++
	}
	return id
}

// Computes returns the compute instances of a profile (by id), ordered by id.
func (i Instance) Computes(profileID uint32) ([]Compute, error) {
	gi, err := i.get("GpuInstanceGetComputeInstances")
	if err != nil {
		return nil, err
	}
	if _, err := i.computeProfile(gi, profileID, InvalidArgument); err != nil {
		return nil, err
	}
	var found []Compute
	for _, c := range gi.Compute {
		if c.Profile == profileID {
			found = append(found, Compute{in: i, id: c.ID, born: c.Born})
		}
	}
	return found, nil
}

// ComputeByID finds a compute instance; NotFound if none has this id.
func (i Instance) ComputeByID(id uint32) (Compute, error) {
	gi, err := i.get("GpuInstanceGetComputeInstanceById")
	if err != nil {
		return Compute{}, err
	}
	for _, c := range gi.Compute {
		if c.ID == id {
			return Compute{in: i, id: c.ID, born: c.Born}, nil
		}
	}
	return Compute{}, NotFound
}

// Instance returns the GPU instance that contains the compute instance.
func (c Compute) Instance() Instance { return c.in }

func (c Compute) get(call string) (GPUInstance, ComputeInstance, error) {
	gi, err := c.in.get(call)
	if err != nil {
		return gi, ComputeInstance{}, err
	}
	for _, x := range gi.Compute {
		if x.ID == c.id && x.Born == c.born {
			return gi, x, nil
		}
	}
	return gi, ComputeInstance{}, NotFound
}

// Info returns the current state of the compute instance.
func (c Compute) Info() (ComputeInstance, error) {
	_, ci, err := c.get("ComputeInstanceGetInfo")
	return ci, err
}

// Destroy destroys the compute instance. It returns InUse while processes use
// it.
func (c Compute) Destroy() error {
	if _, _, err := c.get("ComputeInstanceDestroy"); err != nil {
		return err
	}
	return c.in.g.changeMIG(func(st *State, s *GPUState) error {
		gi := c.in.find(s)
		if gi == nil {
			return NotFound
		}
		for _, p := range s.Processes {
			if p.GPUInstance == gi.ID && p.ComputeInstance == c.id {
				return InUse
			}
		}
		n := len(gi.Compute)
		gi.Compute = slices.DeleteFunc(gi.Compute, func(x ComputeInstance) bool { return x.Born == c.born })
		if len(gi.Compute) == n {
			return NotFound
		}
		st.addMIGEvent(c.in.g.pos, c.in.id, c.id)
		return nil
	})
}

// MIGDevices returns the MIG devices of the GPU that are visible here, in the
// order of their indexes: by GPU instance and compute instance id. A GPU
// instance without compute instance is not a MIG device.
func (g *GPU) MIGDevices() ([]Compute, error) {
	if err := g.needMIGMode("DeviceGetMigDeviceHandleByIndex"); err != nil {
		return nil, err
	}
	return g.migDevices(), nil
}

// MIGDevice returns the MIG device of an index: NotFound for a free index,
// InvalidArgument for an impossible one.
func (g *GPU) MIGDevice(index int) (Compute, error) {
	all, err := g.MIGDevices()
	switch {
	case err != nil:
		return Compute{}, err
	case index < 0 || index >= int(g.model.MIG.MaxDevices):
		return Compute{}, InvalidArgument
	case index >= len(all):
		return Compute{}, NotFound
	}
	return all[index], nil
}

func (g *GPU) migDevices() []Compute {
	var all []Compute
	s := g.state()
	for _, gi := range s.Instances {
		for _, ci := range gi.Compute {
			if g.m.mayUse(s.Minor, gi.ID, ci.ID) {
				all = append(all, Compute{in: Instance{g: g, id: gi.ID, born: gi.Born}, id: ci.ID, born: ci.Born})
			}
		}
	}
	return all
}

// MIGDeviceByUUID finds a MIG device on any GPU.
func (m *Machine) MIGDeviceByUUID(uuid string) (Compute, error) {
	if err := m.call("DeviceGetHandleByUUID", AnyGPU); err != nil {
		return Compute{}, err
	}
	for _, g := range m.gpus {
		for _, c := range g.migDevices() {
			if c.uuid() == uuid {
				return c, g.call("DeviceGetHandleByUUID")
			}
		}
	}
	return Compute{}, NotFound
}

// uuid derives the UUID from the GPU and the instance ids. As on hardware, an
// instance that is created with the ids of an earlier one has the same UUID.
func (c Compute) uuid() string {
	sum := sha1.Sum(fmt.Appendf(nil, "%s/%d/%d", c.in.g.id.UUID, c.in.id, c.id)) //nolint:gosec // as above
	u := uuidText(sum[:16])
	return "MIG-" + u[:14] + "5" + u[15:]
}

// UUID returns the UUID of the MIG device, "MIG-…".
func (c Compute) UUID() (string, error) {
	_, _, err := c.get("DeviceGetUUID")
	return c.uuid(), err
}

// Name returns the name of the MIG device: the GPU's name and the profile's.
func (c Compute) Name() (string, error) {
	gi, ci, err := c.get("DeviceGetName")
	if err != nil {
		return "", err
	}
	p, err := c.in.computeProfile(gi, ci.Profile, Unknown)
	return c.in.g.model.ProductName + " MIG " + p.Name(), err
}

// ProfileName returns the profile of the MIG device: "1g.10gb", or "1c.2g.20gb"
// for a part of a GPU instance.
func (c Compute) ProfileName() (string, error) {
	_, cp, err := c.Attributes()
	return cp.Name(), err
}

// Attributes returns the data of nvmlDeviceAttributes of the MIG device: its
// profiles and memory.
func (c Compute) Attributes() (Profile, ComputeProfile, error) {
	gi, ci, err := c.get("DeviceGetAttributes")
	if err != nil {
		return Profile{}, ComputeProfile{}, err
	}
	cp, err := c.in.computeProfile(gi, ci.Profile, Unknown)
	return c.in.profile(gi), cp, err
}

// MemoryInfo returns the memory of the GPU instance, which all its compute
// instances share.
func (c Compute) MemoryInfo() (MemoryInfo, error) {
	gi, _, err := c.get("DeviceGetMemoryInfo")
	if err != nil {
		return MemoryInfo{}, err
	}
	info := MemoryInfo{Total: c.in.profile(gi).MemorySizeMB << 20}
	for _, p := range c.in.g.m.living(c.in.g.state().Processes) {
		if p.GPUInstance == gi.ID {
			info.Used += p.UsedMemory
		}
	}
	info.Free = info.Total - min(info.Used, info.Total)
	return info, nil
}

// GPUInstanceID is the id of the GPU instance.
func (c Compute) GPUInstanceID() (uint32, error) {
	_, _, err := c.get("DeviceGetGpuInstanceId")
	return c.in.id, err
}

// ComputeInstanceID is the id of the compute instance.
func (c Compute) ComputeInstanceID() (uint32, error) {
	_, _, err := c.get("DeviceGetComputeInstanceId")
	return c.id, err
}

// CapabilityMinors returns the minors of the device nodes
// /dev/nvidia-caps/nvidia-capN that give access to a GPU instance and one of its
// compute instances. It numbers them as the driver does: from 3 on, 15 GPU
// instances with one access file and 8 compute instances each.
func CapabilityMinors(gpuMinor int, gpuInstance, computeInstance uint32) (gi, ci int) {
	const perInstance, perGPU = 9, 15 * 9
	gi = 3 + gpuMinor*perGPU + int(gpuInstance)*perInstance
	return gi, gi + 1 + int(computeInstance)
}

// IsMIG reports whether a UUID is that of a MIG device.
func IsMIG(uuid string) bool { return strings.HasPrefix(uuid, "MIG-") }

// Name returns the name of the profile: "2g.20gb" if it is all of the GPU
// instance, otherwise "1c.2g.20gb".
func (p ComputeProfile) Name() string {
	if p.isWhole() {
		return p.Parent.Name
	}
	return fmt.Sprintf("%dc.%s", p.SliceCount, p.Parent.Name)
}

// Index returns the index of the MIG device among those of its GPU.
func (c Compute) Index() (int, error) {
	if err := c.in.g.call("DeviceGetIndex"); err != nil {
		return 0, err
	}
	if i := slices.Index(c.in.g.migDevices(), c); i >= 0 {
		return i, nil
	}
	return 0, NotFound
}
