package gpu

import "time"

// Conditions of a GPU's health. They are decided by pkg/health.
const (
	// ResetRequired: the GPU, or the GPU with the load on it drained, must be reset.
	ResetRequired ConditionType = "ResetRequired"
	// BusResetRequired: the GPU needs a reset of its PCIe bus.
	BusResetRequired ConditionType = "BusResetRequired"
	// RebootRequired: the node must be rebooted.
	RebootRequired ConditionType = "RebootRequired"
	// PeersMustDrain: programs that use the GPU over NVLink or PCIe from others must
	// end before it can recover (NVML: drain P2P).
	PeersMustDrain ConditionType = "PeersMustDrain"
	// IMEXRecoveryRequired: the node's IMEX domain must be recovered.
	IMEXRecoveryRequired ConditionType = "IMEXRecoveryRequired"
	// RowRemapPending: rows of memory are replaced at the next reset.
	RowRemapPending ConditionType = "RowRemapPending"
	// RowRemapFailed: rows of memory couldn't be replaced.
	RowRemapFailed ConditionType = "RowRemapFailed"
	// NVLinkDown: NVLinks that were active are down.
	NVLinkDown ConditionType = "NVLinkDown"
	// VitalsUnreadable: the driver doesn't say how the GPU is, or whether it must be reset, or
	// doesn't report its errors.
	VitalsUnreadable ConditionType = "VitalsUnreadable"
	// NeedsInspection: the GPU reported an error that people must look at; whether it
	// can be used isn't known.
	NeedsInspection ConditionType = "NeedsInspection"
)

// Effect of a condition on claims, in the words of a device taint.
type Effect string

const (
	// NoTaint: the condition is no property of the GPU's devices.
	NoTaint Effect = ""
	// Informational: the devices have a taint that has no effect.
	Informational Effect = "None"
	// NoSchedule: the GPU's devices are not given to new claims that don't tolerate
	// it.
	NoSchedule Effect = "NoSchedule"
	// NoExecute: NoSchedule, and pods that use the GPU's devices and don't tolerate it
	// are evicted.
	NoExecute Effect = "NoExecute"
)

// TaintKey is the key of the taints that a GPU's conditions put on its devices; their
// value is the condition's type.
const TaintKey = DriverName + "/unhealthy"

// RecoveryAction is the driver's word on how a GPU can recover (NVML
// GPU_RECOVERY_ACTION, field 230).
type RecoveryAction string

const (
	// RecoveryUnsupported: the driver has no recovery actions, because it is older.
	RecoveryUnsupported RecoveryAction = ""
	// RecoveryNotRead: the GPU has not answered, so the driver may have an action.
	RecoveryNotRead       RecoveryAction = "NotRead"
	RecoveryNone          RecoveryAction = "None"
	RecoveryReset         RecoveryAction = "Reset"
	RecoveryReboot        RecoveryAction = "Reboot"
	RecoveryDrainP2P      RecoveryAction = "DrainP2P"
	RecoveryDrainAndReset RecoveryAction = "DrainAndReset"
	RecoveryIMEX          RecoveryAction = "RecoverIMEXDomain"
	RecoveryBusReset      RecoveryAction = "BusReset"
	RecoverySystemReboot  RecoveryAction = "SystemReboot"
	// RecoveryOther: the driver gives an action that this version doesn't know.
	RecoveryOther RecoveryAction = "Other"
)

// Vitals are what the driver says about a GPU's health at one time.
type Vitals struct {
	Recovery RecoveryAction
	// RowRemap is nil on GPUs that don't remap rows, and while the driver doesn't say:
	// it doesn't for a GPU with MIG instances.
	RowRemap *RowRemap
	// NVLinksDown are links that have been active since the plugin opened the driver,
	// and aren't. It is empty in MIG mode, in which links may be off.
	NVLinksDown []int
	// NVLinksUp are those that are active. A link that is neither may be up or down.
	NVLinksUp []int
	// SRAMThresholdExceeded: the driver counts so many uncorrectable errors of SRAM
	// that the GPU should be replaced. It is nil on GPUs and drivers that don't count them,
	// and while the driver doesn't say.
	SRAMThresholdExceeded *bool
}

// RowRemap is the state of a GPU's row remapper (NVML GetRemappedRows).
type RowRemap struct {
	// Pending: a reset is needed to finish.
	Pending bool
	// Failed: a row couldn't be replaced.
	Failed bool
}

// XID is an error that a GPU reported (NVML's event XidCriticalError).
type XID struct {
	GPU UUID
	// Code is a number of NVIDIA's XID catalog.
	Code uint64
	// GPUInstance and ComputeInstance are nil where the error belongs to no instance.
	GPUInstance, ComputeInstance *int
	// At is when the plugin was told.
	At time.Time
}
