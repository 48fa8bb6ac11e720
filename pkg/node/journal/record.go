package journal

import (
	"reflect"
	"slices"

	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Record is the journal's data of one claim: it holds these devices, from
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
	// Pods that the claim was reserved for when it was prepared. Others may have
	// joined since: the kubelet prepares a claim once.
	Pods []Pod `json:"pods,omitempty"`
}

// Pod is a pod in the claim's namespace.
type Pod struct {
	UID  string `json:"uid"`
	Name string `json:"name"`
}

func (r Record) key() string { return r.ClaimUID }

// Grant is one device given to one request of the claim.
type Grant struct {
	Device gpu.DeviceName `json:"device"`
	// GPU is the device's parent: names may become longer when a GPU joins
	// the node, UUIDs don't.
	GPU     gpu.UUID `json:"gpu"`
	Request string   `json:"request"`
	// Partition of the GPU that the device is, or is a share of; zero for the whole
	// GPU.
	Partition Partition `json:"partition,omitzero"`
	// Share says which MPS share of it the device is; nil where it is none.
	Share *Part `json:"share,omitempty"`
	// Replica says which time-sliced replica of it the device is; nil where it is
	// none.
	Replica *Part `json:"replica,omitempty"`
	// MPS has the limits of the claim's processes on the device as clients of an
	// MPS daemon; nil without a daemon. Shares always have it.
	MPS *MPS `json:"mps,omitempty"`
	// TimeSlice is the interval that the claim's configuration asks for; empty
	// where it asks for none.
	TimeSlice string `json:"timeSlice,omitempty"`
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

// Part is one of several that have a device together.
type Part struct {
	// Count is how many there are; 0 where each claim takes as much as it asked
	// for.
	Count  int `json:"count"`
	Number int `json:"number"`
}

// MPS says how a claim's processes are clients of an MPS daemon.
type MPS struct {
	// ThreadPercentage and MemoryMiB as in gpu.Limits.
	ThreadPercentage int   `json:"threadPercentage,omitempty"`
	MemoryMiB        int64 `json:"memoryMiB,omitempty"`
}

// PartitionOf describes the partition that a device is, or is a share of; zero
// where that is a whole GPU.
func PartitionOf(d gpu.Device) Partition {
	p, ok := gpu.Base(d).(gpu.Partition)
	if !ok {
		return Partition{}
	}
	return Partition{Profile: p.Profile, Start: p.Placement.Start, Size: p.Placement.Size}
}

// GrantOf describes a device to a Grant: the GPU, and which part of it the device
// is.
func GrantOf(name gpu.DeviceName, d gpu.Device) Grant {
	g := Grant{Device: name, GPU: d.Parent(), Partition: PartitionOf(d)}
	switch d := d.(type) {
	case gpu.Whole, gpu.Partition:
	case gpu.Share:
		g.Share = &Part{Count: d.Count, Number: d.Number}
	case gpu.Replica:
		g.Replica = &Part{Count: d.Count, Number: d.Number}
	}
	return g
}

// Of returns the device of the grant.
func (g Grant) Of() gpu.Device {
	base := g.Base()
	switch {
	case g.Share != nil:
		return gpu.Share{Of: base, Count: g.Share.Count, Number: g.Share.Number}
	case g.Replica != nil:
		return gpu.Replica{GPU: g.GPU, Count: g.Replica.Count, Number: g.Replica.Number}
	default:
		return base
	}
}

// Base is the silicon that the grant is of, alone or together with others: the
// gpu.Base of Of.
func (g Grant) Base() gpu.Device {
	if p := g.Partition; p != (Partition{}) {
		return gpu.Partition{GPU: g.GPU, Profile: p.Profile, Placement: gpu.Placement{Start: p.Start, Size: p.Size}}
	}
	return gpu.Whole{GPU: g.GPU}
}

// Name tells the grant from the claim's others: the device's name and, where the
// device can be given several times, the share's ID.
func (g Grant) Name() gpu.DeviceName {
	if g.ShareID == "" {
		return g.Device
	}
	return g.Device + "-" + gpu.DeviceName(g.ShareID)
}

// IsShared says whether the claim has the device together with others, or its
// processes have it together in a way that has to be set up. An admin grant isn't
// shared.
func (g Grant) IsShared() bool {
	return !g.Admin && (g.Share != nil || g.Replica != nil || g.MPS != nil || g.TimeSlice != "")
}

// Equal says whether two grants are of the same device, for the same request,
// with the same limits.
func (g Grant) Equal(h Grant) bool { return reflect.DeepEqual(g, h) }

// Same says whether two grants are of the same device for the same request,
// whatever their limits are: those of an allocation never change, but what they
// are computed from may, with the driver.
func (g Grant) Same(h Grant) bool {
	g.MPS, h.MPS = nil, nil
	return g.Equal(h)
}

// Holds says whether the record keeps others from being given the device.
func (r Record) Holds(d gpu.Device) bool {
	return slices.ContainsFunc(r.Grants, func(g Grant) bool { return !g.Admin && gpu.Conflict(g.Of(), d) })
}

// Shares says whether any of the record's grants is shared.
func (r Record) Shares() bool { return slices.ContainsFunc(r.Grants, Grant.IsShared) }

// AwaitsKubelet reports whether the claim has lost something with an earlier
// boot: its partitions, daemons or settings. None of its containers is running,
// and the lost parts are created when the kubelet prepares the claim again.
func (r Record) AwaitsKubelet(bootID string) bool {
	return r.BootID != bootID && slices.ContainsFunc(r.Grants, func(g Grant) bool {
		return g.Partition != Partition{} || g.Share != nil || g.IsShared()
	})
}

// OwnDaemon returns the grants whose processes are clients of an MPS daemon of the
// claim's own, because its configuration says so: whole GPUs, or one partition. The
// order is that of the daemon's device indexes.
func (r Record) OwnDaemon() []Grant {
	var own []Grant
	for _, g := range r.Grants {
		if g.MPS != nil && g.Share == nil && !g.Admin {
			own = append(own, g)
		}
	}
	return own
}

// SharedMiB returns how much memory the record's MPS shares of a GPU or partition
// have. Those of one request have it together.
func (r Record) SharedMiB(of gpu.Device) int64 {
	requests := map[string]int64{}
	for _, g := range r.Grants {
		if !g.Admin && g.Share != nil && g.MPS != nil && g.Base() == of {
			name := resourceclaim.BaseRequestRef(g.Request)
			requests[name] = max(requests[name], g.MPS.MemoryMiB)
		}
	}
	sum := int64(0)
	for _, mib := range requests {
		sum += mib
	}
	return sum
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

// GPURecord is the journal's data of one GPU: the partitions created on it,
// from before the first effect until after the last is undone. The claims'
// records show which partitions are in use.
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

// Settings are remembered of one GPU while settings of it that reach beyond one
// claim are not as they were found: from before the first is changed until after
// the last is put back.
type Settings struct {
	GPU gpu.UUID `json:"gpu"`
	// BootID of the boot in which it was written. In any other the driver has
	// forgotten what was set.
	BootID string `json:"bootID"`
	// ComputeModeBefore is the compute mode that was found, as pkg/nvml spells it;
	// empty where this driver didn't change it.
	ComputeModeBefore string `json:"computeModeBefore,omitempty"`
	// Closed says that this driver has set, or was about to set, the compute mode
	// that lets no process use the GPU, because an MPS daemon of it was away: from
	// before that until after the mode is another one.
	Closed bool `json:"closed,omitempty"`
	// OpenedByOthers is set while somebody else has set the compute mode back to the
	// default, although claims need another: it stays, also when MPS servers are
	// replaced.
	OpenedByOthers bool `json:"openedByOthers,omitempty"`
	// TimeSliceBefore is the interval that was found; empty where this driver didn't
	// change it.
	TimeSliceBefore string `json:"timeSliceBefore,omitempty"`
}

func (s Settings) key() string { return string(s.GPU) }

// UnreadableGPU is a GPU's unreadable file, which was renamed.
type UnreadableGPU struct {
	// GPU is derived from the file's name.
	GPU gpu.UUID
	// Path where the file is now.
	Path string
	// Err says what is wrong with the file; nil never.
	Err error
}

// Unreadable is a claim's unreadable file, which was renamed.
type Unreadable struct {
	// ClaimUID is derived from the file's name.
	ClaimUID string
	// Path where the file is now.
	Path string
	// Record has the parts of the file that could be read; its Grants are empty if
	// none could.
	Record Record
	// Err says what is wrong with the file; nil never.
	Err error
}
