package gpu

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// UUID identifies one GPU, or one MIG device, as NVML prints it:
// "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" or "MIG-…". That of an integrated GPU has
// no prefix.
// It survives reboots; a MIG device's UUID repeats when the same instance ids
// are made again on the same GPU.
type UUID string

// IsWhole reports whether the UUID is a GPU's, not a MIG device's.
func (u UUID) IsWhole() bool { return strings.HasPrefix(string(u), wholePrefix) }

// wholePrefix begins the UUID of a GPU.
const wholePrefix = "GPU-"

// PCIAddress is a PCI function as sysfs spells it: "0000:07:00.0", lower case,
// four-digit domain (NVML prints eight digits; see NewPCIAddress).
type PCIAddress string

// NewPCIAddress turns NVML's bus id ("00000000:07:00.0", upper or lower case)
// into the spelling of sysfs, whose domain has four digits unless it needs
// more. Anything else comes back lower-cased, unchanged.
func NewPCIAddress(busID string) PCIAddress {
	s := strings.ToLower(busID)
	if domain, rest, ok := strings.Cut(s, ":"); ok {
		for len(domain) > 4 && domain[0] == '0' {
			domain = domain[1:]
		}
		s = domain + ":" + rest
	}
	return PCIAddress(s)
}

// Node is the report of one node's plugin: all facts that the controller needs
// to decide which devices are offered there, and none that changes while the
// node is idle.
type Node struct {
	// Name of the Kubernetes Node.
	Name string
	// DriverVersion as NVML prints it, e.g. "580.159.04".
	DriverVersion string
	// CUDADriverVersion is "major.minor", e.g. "13.0".
	CUDADriverVersion string
	// GPUs in the order of their indexes.
	GPUs []GPU
}

// GPU is one physical GPU.
type GPU struct {
	UUID UUID
	// Index is NVML's; it may move on reboot, hot-plug and MIG toggles.
	Index int
	// Minor is N of /dev/nvidiaN; NoMinor where NVML doesn't report it.
	Minor int
	PCI   PCIAddress
	// PCIeRoot is the root complex the GPU hangs off, as sysfs spells it
	// ("pci0000:00"); empty where the host doesn't report it.
	PCIeRoot string
	// NUMANode is nil where the host doesn't report it.
	NUMANode *int

	Model Model

	// MemoryBytes is NVML's total, reserved memory included; 0 where NVML doesn't report
	// it, because the GPU has no memory of its own.
	MemoryBytes int64
	// MemoryReservedBytes of it the driver keeps for itself; 0 where NVML doesn't
	// report it.
	MemoryReservedBytes int64

	// ECCEnabled is nil where the GPU has no ECC.
	ECCEnabled *bool
	// VirtualizationMode is "none", "passthrough", "vgpu", "host-vgpu" or
	// "host-vsga"; empty where NVML doesn't report it.
	VirtualizationMode string
	// Fabric is nil where the GPU is in no NVLink fabric.
	Fabric *Fabric
	// NVLink is nil where no NVLink of the GPU has been active.
	NVLink *NVLink
	// AddressingMode is how the GPU reaches the memory of processes: "HMM", "ATS" or
	// "None"; empty where NVML doesn't report it.
	AddressingMode string

	// MIG is nil where the GPU has no MIG.
	MIG *MIG

	// Conditions say what is wrong with the GPU; none means healthy.
	Conditions []Condition
}

// Answered reports whether NVML, when the GPU was last read, answered with the facts that are
// needed to use it. Conditions are those of that reading.
func (g GPU) Answered() bool {
	return !slices.ContainsFunc(g.Conditions, func(c Condition) bool {
		return slices.Contains([]ConditionType{Lost, Unreadable, NotResponding, ResetRequired}, c.Type)
	})
}

// NoMinor is the minor number of a GPU without a device node.
const NoMinor = -1

// Model has the facts that all GPUs of one product share.
type Model struct {
	// ProductName as NVML prints it, e.g. "NVIDIA H100 80GB HBM3".
	ProductName string
	// Brand, e.g. "Nvidia", "Tesla", "NvidiaRTX".
	Brand string
	// Architecture, e.g. "Hopper".
	Architecture string
	// CUDAComputeCapability is "major.minor", e.g. "9.0".
	CUDAComputeCapability string
}

// FromVolta reports whether the GPU is of compute capability 7.0 or more. Only such
// GPUs have MPS limits, and time slices whose length can be set. A capability that
// isn't known counts as enough.
func (m Model) FromVolta() bool {
	major, _, _ := strings.Cut(m.CUDAComputeCapability, ".")
	n, err := strconv.Atoi(major)
	return err != nil || n >= 7
}

// Fabric places a GPU in an NVLink fabric (NVML GpuFabricInfo).
type Fabric struct {
	ClusterUUID string
	CliqueID    int
}

// NVLink says how a GPU is linked to others. It doesn't change when a link goes
// down for a while.
type NVLink struct {
	// Links that have been active since the driver was loaded or the plugin started.
	Links int
	// Domain is the same for the GPUs of a node that reach each other over NVLink,
	// some perhaps through another GPU: SwitchDomain, or the UUID of one of them.
	// Empty where the links lead to no GPU of the node.
	Domain string
}

// SwitchDomain is the NVLink domain of a node's GPUs that are linked by NVSwitches.
const SwitchDomain = "nvswitch"

// MIG is the Multi-Instance GPU side of a GPU that can do it.
type MIG struct {
	// Enabled is the current mode; Pending is the mode after the next reset. In a
	// node's report, a mode that this driver switched on for a claim counts as
	// off, so that the report doesn't change with claims.
	Enabled, Pending bool
	// Switchable says that this driver may switch the mode: it takes effect at
	// once, and nothing but this GPU is touched. Never so on Ampere, which needs
	// a reset, nor in guests.
	Switchable bool
	// Profiles the GPU can be cut into, in NVML's order.
	Profiles []Profile
	// Instances that exist now, by GPU instance id. A node's report has only those
	// that this driver didn't create.
	Instances []Instance
}

// Profile is one way to cut a GPU (NVML GpuInstanceProfileInfo).
type Profile struct {
	// Name, e.g. "1g.18gb", "1g.18gb+me".
	Name string
	// ID is the parameter of NVML's create and placement calls.
	ID int
	// MaxInstances of this profile on an otherwise empty GPU.
	MaxInstances int
	// MemoryBytes an instance has.
	MemoryBytes int64
	Engines     Engines
	Placements  []Placement
}

// Engines are the counted units of a GPU or of a part of it.
type Engines struct {
	Multiprocessors int
	CopyEngines     int
	Decoders        int
	Encoders        int
	JPEGEngines     int
	OFAEngines      int
}

// Placement is a range of memory slices: [Start, Start+Size).
type Placement struct {
	Start, Size int
}

// Overlaps reports whether the two ranges share a memory slice.
func (p Placement) Overlaps(q Placement) bool {
	return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

// Instance is a GPU instance that exists. It is a MIG device if one compute
// instance takes all of it.
type Instance struct {
	// UUID of the MIG device; empty where it is none.
	UUID          UUID
	Profile       string
	Placement     Placement
	GPUInstanceID int
	// ComputeInstanceID is NoComputeInstance where it is no MIG device: the GPU
	// instance has no compute instance, or is divided among several.
	ComputeInstanceID int
}

// NoComputeInstance is the id of a compute instance that isn't there.
const NoComputeInstance = -1

// Condition is something wrong with a GPU.
type Condition struct {
	Type    ConditionType
	Message string
	// Since is when it was first reported. It is zero in what the plugin reads, so that
	// equal facts compare equal.
	Since time.Time
	// ByPolicy is the effect that a policy gives it; empty where none does.
	ByPolicy Effect
	// Refused are the devices that claims were allocated and could not be given, only of
	// PrepareFailed. The first is the one that is offered again at RetryAt, so that one claim
	// tries it.
	Refused []DeviceName
	RetryAt time.Time
	// Turn says which device is to be tried, see TurnAt, by the clock of whoever decides on the
	// offer. It is 0 in what the plugin reads.
	Turn int
}

// turnLength is how long one device is offered to be tried before another one is.
const turnLength = 30 * time.Minute

// TurnAt returns which of the devices that need refused silicon a claim is to try: 0, none, until
// retryAt; then 1, the first one; and one more after each half hour, because claims for one
// device may never come. When a claim has tried one, the plugin reports another retryAt, or the
// end of the condition. left is how long the turn lasts.
func TurnAt(retryAt, now time.Time) (turn int, left time.Duration) {
	if left = retryAt.Sub(now); left > 0 {
		return 0, left
	}
	since := now.Sub(retryAt)
	return 1 + int(since/turnLength), turnLength - since%turnLength
}

// ConditionType names a kind of trouble, in the form Kubernetes uses for
// condition types.
type ConditionType string

const (
	// Lost: the GPU fell off the bus (NVML GPU_IS_LOST). It takes no claims.
	Lost ConditionType = "Lost"
	// DeviceNodeMissing: a /dev/nvidia* node that containers need isn't there, and
	// nvidia-modprobe didn't make it. It takes no claims until the node is there.
	DeviceNodeMissing ConditionType = "DeviceNodeMissing"
	// StateUnreadable: a journal file that names this GPU could not be read and
	// was renamed; the recorded devices may still be in use.
	StateUnreadable ConditionType = "StateUnreadable"
	// Unreadable: NVML did not answer for this GPU, or not with a fact that is needed to
	// use it.
	Unreadable ConditionType = "Unreadable"
	// AttributesUnreadable: NVML did not answer with facts that only selectors need. They
	// are as they were last known.
	AttributesUnreadable ConditionType = "AttributesUnreadable"
	// UnusableUUID: devices can't be named after the GPU's UUID, because it has another
	// form, or another GPU of the node has the same. It blocks new claims.
	UnusableUUID ConditionType = "UnusableUUID"
	// FabricNotReady: the GPU is behind NVSwitches, and Fabric Manager has not registered
	// it. It blocks new claims, because CUDA programs fail on such a GPU.
	FabricNotReady ConditionType = "FabricNotReady"
	// NotResponding: a call into the driver for this GPU has not returned. It takes
	// no claims until the call has.
	NotResponding ConditionType = "NotResponding"
	// CDIFailed: the CDI specifications could not be computed or written. Claims are
	// refused until they can.
	CDIFailed ConditionType = "CDIFailed"
	// MPSDaemonFailed: an MPS daemon that claims need fails again and again, doesn't
	// answer, or has no server. It concerns shares only.
	MPSDaemonFailed ConditionType = "MPSDaemonFailed"
	// PrepareFailed: the GPU could not be made ready for claims that were allocated some of its
	// devices. It concerns the devices that need the same silicon, until a claim is given some
	// of that.
	PrepareFailed ConditionType = "PrepareFailed"
	// ComputeModeChanged: somebody has set the compute mode of a GPU with MPS shares
	// to one that doesn't keep other processes off it. It is left so.
	ComputeModeChanged ConditionType = "ComputeModeChanged"
	// TimeSliceUnsupported: the length of a time slice that is asked for can't be
	// set.
	TimeSliceUnsupported ConditionType = "TimeSliceUnsupported"
)

// Effect returns the condition's effect on claims.
func (c Condition) Effect() Effect { return cmp.Or(c.ByPolicy, c.Type.Effect()) }

// EffectOn returns the condition's effect on claims for one device of the GPU, whether a claim
// is to try the device or not. While rows wait to be replaced, a policy keeps claims only off
// the whole GPU. After refusals, a policy ends pods only on the refused devices, and on none
// that may have been given to another claim all the same.
func (c Condition) EffectOn(device DeviceName, names *Names) Effect {
	switch {
	case c.Type == RowRemapPending && device.Type() != TypeGPU:
		return c.Type.Effect()
	case c.Type.OnlyMPS() && !device.IsShare():
		return NoTaint
	case c.Type == PrepareFailed && !c.needsRefused(device, names):
		return NoTaint
	case c.Type == PrepareFailed && (device.AllowsMultipleAllocations() || !slices.Contains(c.Refused, device)):
		return c.Type.Effect()
	}
	return c.Effect()
}

// needsRefused reports whether the device needs the silicon of a refused one. That may be any
// silicon if the GPU's tables don't list the device any more.
func (c Condition) needsRefused(device DeviceName, names *Names) bool {
	d, unlisted := names.Device(device)
	return slices.ContainsFunc(c.Refused, func(name DeviceName) bool {
		refused, err := names.Device(name)
		return unlisted != nil || err != nil || NeedsSilicon(d, refused)
	})
}

// BlocksDevice reports whether one device of a GPU with this condition must not be given to
// new claims, but for one that is to try it.
func (c Condition) BlocksDevice(device DeviceName, names *Names) bool {
	return c.EffectOn(device, names).blocks()
}

// BlocksAllDevices reports whether no device of a GPU with this condition must be given to
// new claims.
func (c Condition) BlocksAllDevices() bool {
	return c.Blocks() && c.Type != RowRemapPending && c.Type != PrepareFailed && !c.Type.OnlyMPS()
}

// Blocks reports whether some device of a GPU with this condition must not be given to new
// claims.
func (c Condition) Blocks() bool { return c.Effect().blocks() }

func (e Effect) blocks() bool { return e == NoSchedule || e == NoExecute }

// Effect returns the effect of such a condition on claims unless a policy says more.
func (t ConditionType) Effect() Effect {
	switch t {
	case Lost, Unreadable, NotResponding, StateUnreadable, DeviceNodeMissing, UnusableUUID, FabricNotReady,
		ResetRequired, BusResetRequired, RebootRequired, PeersMustDrain, RowRemapFailed, MPSDaemonFailed, PrepareFailed:
		return NoSchedule
	case IMEXRecoveryRequired, RowRemapPending, NVLinkDown, NeedsInspection, AttributesUnreadable, VitalsUnreadable:
		return Informational
	case CDIFailed, ComputeModeChanged, TimeSliceUnsupported:
		return NoTaint
	default: // of a newer version
		return NoTaint
	}
}

// OnlyMPS reports whether such a condition concerns only clients of the GPU's MPS daemons.
func (t ConditionType) OnlyMPS() bool { return t == MPSDaemonFailed }

// DefaultTimeSlice is the interval of time-slicing that a driver starts with.
const DefaultTimeSlice = "Default"
