package journal

import (
	"slices"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Record is what is remembered of one claim: it holds these devices, from
// before the first effect of its prepare until after the last effect of its
// unprepare.
type Record struct {
	ClaimUID  string `json:"claimUID"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// BootID of the boot in which the kubelet last had the claim prepared. No
	// container of the claim can be running in any other.
	BootID string  `json:"bootID"`
	Grants []Grant `json:"grants"`
}

func (r Record) key() string { return r.ClaimUID }

// Grant is one device given to one request of the claim.
type Grant struct {
	Device gpu.DeviceName `json:"device"`
	// GPU is the device's parent: names may become longer when a GPU joins
	// the node, UUIDs don't.
	GPU     gpu.UUID `json:"gpu"`
	Request string   `json:"request"`
	// Partition of the GPU that the device is; zero for the whole GPU.
	Partition Partition `json:"partition,omitzero"`
	// Admin grants hold nothing.
	Admin   bool   `json:"admin,omitempty"`
	ShareID string `json:"shareID,omitempty"`
}

// Partition says which part of a GPU a grant is of.
type Partition struct {
	Profile string `json:"profile"`
	Start   int    `json:"start"`
	Size    int    `json:"size"`
}

// PartitionOf describes the device to a Grant: zero for a whole GPU.
func PartitionOf(d gpu.Device) Partition {
	p, ok := d.(gpu.Partition)
	if !ok {
		return Partition{}
	}
	return Partition{Profile: p.Profile, Start: p.Placement.Start, Size: p.Placement.Size}
}

// Of is what the grant is of.
func (g Grant) Of() gpu.Device {
	if p := g.Partition; p != (Partition{}) {
		return gpu.Partition{GPU: g.GPU, Profile: p.Profile, Placement: gpu.Placement{Start: p.Start, Size: p.Size}}
	}
	return gpu.Whole{GPU: g.GPU}
}

// Holds says whether the record keeps others from being given the device.
func (r Record) Holds(d gpu.Device) bool {
	return slices.ContainsFunc(r.Grants, func(g Grant) bool { return !g.Admin && gpu.Conflict(g.Of(), d) })
}

// GPUs returns the GPUs the record names, sorted, each once.
func (r Record) GPUs() []gpu.UUID {
	uuids := make([]gpu.UUID, 0, len(r.Grants))
	for _, g := range r.Grants {
		uuids = append(uuids, g.GPU)
	}
	slices.Sort(uuids)
	return slices.Compact(uuids)
}

// GPURecord is what is remembered of one GPU: what was made of it, from before
// the first effect until after the last is undone. Whether somebody uses a
// partition, the claims' records tell.
type GPURecord struct {
	GPU gpu.UUID `json:"gpu"`
	// BootID of the boot in which it was written. In any other the hardware has
	// forgotten all of it.
	BootID string `json:"bootID"`
	// ModeSwitched says that MIG mode was switched on, or was about to be.
	ModeSwitched bool            `json:"modeSwitched,omitempty"`
	Partitions   []MadePartition `json:"partitions,omitempty"`
}

func (r GPURecord) key() string { return string(r.GPU) }

// MadePartition is a partition that was made, or was about to be.
type MadePartition struct {
	Partition
	// Made is nil from before the instance is made until it is known by its
	// ids. When that was written, nothing was at the partition's place.
	Made *MadeInstance `json:"made,omitempty"`
}

// MadeInstance is how the hardware numbers an instance. Ids are used again for
// later instances, and so is the UUID.
type MadeInstance struct {
	GPUInstanceID int `json:"gpuInstanceID"`
	// ComputeInstanceID is gpu.NoComputeInstance where only the GPU instance was
	// made and couldn't be undone.
	ComputeInstanceID int      `json:"computeInstanceID"`
	UUID              gpu.UUID `json:"uuid,omitempty"`
}

// UnreadableGPU is a GPU's file that was put aside.
type UnreadableGPU struct {
	// GPU as the file's name tells it.
	GPU gpu.UUID
	// Path where the file is now.
	Path string
	// Err says what is wrong with the file; nil never.
	Err error
}

// Unreadable is a claim's file that was put aside.
type Unreadable struct {
	// ClaimUID as the file's name tells it.
	ClaimUID string
	// Path where the file is now.
	Path string
	// Record is what could be made out in the file in spite of all; its
	// Grants are empty where nothing could.
	Record Record
	// Err says what is wrong with the file; nil never.
	Err error
}
