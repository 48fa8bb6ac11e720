package holding

import (
	"reflect"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// Record says that one claim holds these devices: from before the first effect of
// its prepare until after the last effect of its unprepare.
type Record struct {
	ClaimUID  string `json:"claimUID"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// BootID of the boot in which the kubelet last had the claim prepared. No
	// container of the claim can be running in any other.
	BootID string `json:"bootID"`
	// Holdings are named grants in JSON: that is how earlier releases wrote them.
	Holdings []Holding `json:"grants"`
	// Pods that the claim was reserved for when it was prepared. Others may have
	// joined since: the kubelet prepares a claim once.
	Pods []Pod `json:"pods,omitempty"`
	// RefusedClaims are the UIDs of claims that weren't prepared because of this one and
	// whose double allocation has been reported.
	RefusedClaims []string `json:"refusedClaims,omitempty"`
	// GivenUp is set when the claim was unprepared while its GPUs were lost and its
	// containers still ran: to the load of the driver at that time. The record then keeps the
	// devices from other claims until the containers have ended or the driver was loaded
	// again; the kubelet knows nothing of it any more.
	GivenUp *health.Load `json:"givenUp,omitempty"`
}

// Realized is a claim's record with what its CDI spec and status need besides: the MIG instances
// of its partitions, and the directories of its MPS daemons.
type Realized struct {
	Record

	// Instances are those of the partitions that the claim has, or has shares of.
	Instances map[gpu.Partition]gpu.Instance
	// Daemons has the directories of the MPS daemons that the claim's processes are clients
	// of, by the daemons' names.
	Daemons map[string]gpu.MPSDirs
}

// Pod is a pod in the claim's namespace.
type Pod struct {
	UID  string `json:"uid"`
	Name string `json:"name"`
}

// Key returns the UID that names the record.
func (r Record) Key() string { return r.ClaimUID }

// Holding is one device given to one request of the claim.
type Holding struct {
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
	// Admin: the access keeps nobody from the device.
	Admin   bool   `json:"admin,omitempty"`
	ShareID string `json:"shareID,omitempty"`
}

// Partition says which part of a GPU a holding is of.
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

// New returns the holding of a device: its name, its GPU, and the part of the GPU that
// the device is.
func New(name gpu.DeviceName, d gpu.Device) Holding {
	g := Holding{Device: name, GPU: d.Parent(), Partition: PartitionOf(d)}
	switch d := d.(type) {
	case gpu.Whole, gpu.Partition:
	case gpu.Share:
		g.Share = &Part{Count: d.Count, Number: d.Number}
	case gpu.Replica:
		g.Replica = &Part{Count: d.Count, Number: d.Number}
	}
	return g
}

// Of returns the device itself; Device is its name.
func (g Holding) Of() gpu.Device {
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

// Base is the silicon that the holding is of, alone or together with others: the
// gpu.Base of its device.
func (g Holding) Base() gpu.Device {
	if p := g.Partition; p != (Partition{}) {
		return gpu.Partition{GPU: g.GPU, Profile: p.Profile, Placement: gpu.Placement{Start: p.Start, Size: p.Size}}
	}
	return gpu.Whole{GPU: g.GPU}
}

// CDIName returns the name of the holding's CDI device: the device's name, with the share's ID if
// the device can be allocated several times. A held device and admin access to it have the same.
func (g Holding) CDIName() gpu.DeviceName {
	if g.ShareID == "" {
		return g.Device
	}
	return g.Device + "-" + gpu.DeviceName(g.ShareID)
}

// IsShared reports whether the claim has the device together with others, or its
// processes have it together in a way that has to be set up. An admin holding isn't
// shared.
func (g Holding) IsShared() bool {
	return !g.Admin && (g.Share != nil || g.Replica != nil || g.MPS != nil || g.TimeSlice != "")
}

// Equal reports whether two holdings are of the same device, for the same request,
// with the same limits.
func (g Holding) Equal(h Holding) bool { return reflect.DeepEqual(g, h) }

// Same reports whether two holdings are of the same device for the same request,
// whatever their limits are: those of an allocation never change, but what they
// are computed from may, with the driver.
func (g Holding) Same(h Holding) bool {
	g.MPS, h.MPS = nil, nil
	return g.Equal(h)
}

// Holds reports whether the record keeps others from being given the device.
func (r Record) Holds(d gpu.Device) bool {
	return slices.ContainsFunc(r.Holdings, func(g Holding) bool { return !g.Admin && gpu.Conflict(g.Of(), d) })
}

// CDIDevices returns the holdings by CDIName. If two have one name, the held one wins.
func (r Record) CDIDevices() map[gpu.DeviceName]Holding {
	devices := make(map[gpu.DeviceName]Holding, len(r.Holdings))
	for _, g := range r.Holdings {
		if _, there := devices[g.CDIName()]; !there || !g.Admin {
			devices[g.CDIName()] = g
		}
	}
	return devices
}

// Shares reports whether any of the record's holdings is shared.
func (r Record) Shares() bool { return slices.ContainsFunc(r.Holdings, Holding.IsShared) }

// AwaitsKubelet reports whether the claim has lost something with an earlier
// boot: its partitions, daemons or settings. None of its containers is running,
// and the lost parts are created when the kubelet prepares the claim again.
func (r Record) AwaitsKubelet(bootID string) bool {
	return r.BootID != bootID && slices.ContainsFunc(r.Holdings, func(g Holding) bool {
		return g.Partition != Partition{} || g.Share != nil || g.IsShared()
	})
}

// OwnDaemon returns the holdings whose processes are clients of an MPS daemon of the
// claim's own, because its configuration says so: whole GPUs, or one partition. The
// order is that of the daemon's device indexes.
func (r Record) OwnDaemon() []Holding {
	var own []Holding
	for _, g := range r.Holdings {
		if g.MPS != nil && g.Share == nil && !g.Admin {
			own = append(own, g)
		}
	}
	return own
}

// MemoryLimits returns how much memory the processes of a holding with MPS may have on each
// device of their daemon, in MiB and in the order of its device indexes; 0: no limit.
func (r Record) MemoryLimits(g Holding) []int64 {
	if g.Share != nil {
		return []int64{g.MPS.MemoryMiB}
	}
	var limits []int64
	for _, own := range r.OwnDaemon() {
		limits = append(limits, own.MPS.MemoryMiB)
	}
	return limits
}

// SharedMiB returns how much memory the record's MPS shares of a GPU or partition
// have. Those of one request have it together.
func (r Record) SharedMiB(of gpu.Device) int64 {
	requests := map[string]int64{}
	for _, g := range r.Holdings {
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
	uuids := make([]gpu.UUID, 0, len(r.Holdings))
	for _, g := range r.Holdings {
		uuids = append(uuids, g.GPU)
	}
	slices.Sort(uuids)
	return slices.Compact(uuids)
}

// claimDaemonPrefix starts the name of an MPS daemon that is one claim's.
const claimDaemonPrefix = "claim-"

// Daemon is the name of the MPS daemon that the holding's processes are clients of:
// that of the GPU or partition that is shared, or one of the claim's own. Empty
// where there is none.
func (r Record) Daemon(g Holding) string {
	switch {
	case g.MPS == nil || g.Admin:
		return ""
	case g.Share == nil:
		return r.OwnDaemonName()
	default:
		return g.SharedDaemonName()
	}
}

// Daemons are the names of the MPS daemons that the record's processes are clients of, each
// once.
func (r Record) Daemons() []string {
	var names []string
	for _, g := range r.Holdings {
		if name := r.Daemon(g); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// OwnDaemonName is the name that an MPS daemon of the claim's own has.
func (r Record) OwnDaemonName() string { return claimDaemonPrefix + r.ClaimUID }

// OwnerOf returns the UID of the claim whose own the MPS daemon of that name is; false if it
// is no claim's own.
func OwnerOf(daemon string) (claimUID string, ok bool) {
	return strings.CutPrefix(daemon, claimDaemonPrefix)
}

// SharedDaemonName returns the name of the MPS daemon of the device that is
// shared, derived from the share's name; empty if the device is not a share.
func (g Holding) SharedDaemonName() string { return string(g.Device.SharedDevice()) }

// GPURecord has what was made on one GPU for claims: the partitions created on it,
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

// Key returns the UUID that names the record.
func (r GPURecord) Key() string { return string(r.GPU) }

// MadePartition is a partition that was made, or was about to be.
type MadePartition struct {
	Partition
	// Made is nil from the intent until the instance's ids are known. When the intent
	// was written, nothing was at that placement.
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

// Settings has a GPU's original settings while Tessera has changed them: from before
// the first change until after the last is restored.
type Settings struct {
	GPU gpu.UUID `json:"gpu"`
	// BootID of the boot in which it was written. In any other the driver has
	// forgotten what was set.
	BootID string `json:"bootID"`
	// ComputeModeBefore is the original compute mode, as pkg/nvml spells it; empty if
	// Tessera didn't change it.
	ComputeModeBefore string `json:"computeModeBefore,omitempty"`
	// Closed is set from before Tessera sets PROHIBITED, because the GPU's MPS daemon is
	// down, until after it sets another mode.
	Closed bool `json:"closed,omitempty"`
	// OpenedByOthers is set while another program has reset the mode to DEFAULT although
	// claims need another. Tessera then leaves it, also when MPS servers are replaced.
	OpenedByOthers bool `json:"openedByOthers,omitempty"`
	// TimeSliceBefore is the original interval; empty if Tessera didn't change it.
	TimeSliceBefore string `json:"timeSliceBefore,omitempty"`
}

// Key returns the UUID that names the settings.
func (s Settings) Key() string { return string(s.GPU) }

// Health has the state of a GPU with which something is wrong, or was until an admin
// ended it.
type Health struct {
	GPU   gpu.UUID     `json:"gpu"`
	State health.State `json:"state"`
}

// Key returns the UUID that names the record.
func (h Health) Key() string { return string(h.GPU) }

// Seen has the GPUs of the last reading of the hardware, so that one which is lost while no
// plugin runs is missed. Its file has the fields of gpu.GPU by the names that they have there.
type Seen struct {
	// BootID of the boot in which they were read.
	BootID string `json:"bootID"`
	// GPUs with what lasts of their facts: without conditions and MIG instances.
	GPUs []gpu.GPU `json:"gpus"`
}

// Key returns the name of the record.
func (Seen) Key() string { return "gpus" }
