package nvmlsim

import (
	"cmp"
	"fmt"
	"slices"
)

// Health is the state of a GPU that something is wrong with; the zero value is
// that of a healthy GPU.
type Health struct {
	// Lost means that the GPU has fallen off the bus: every call answers
	// GPUIsLost.
	Lost bool `json:"lost,omitempty"`
	// Wedged keeps every call from returning.
	Wedged bool `json:"wedged,omitempty"`
	// ResetRequired makes every call answer ResetRequired.
	ResetRequired bool `json:"resetRequired,omitempty"`
	// RecoveryAction is the value of field 230.
	RecoveryAction RecoveryAction `json:"recoveryAction,omitempty"`
	RemappedRows   RemappedRows   `json:"remappedRows,omitzero"`
	// UncorrectableErrors of memory since the driver was loaded.
	UncorrectableErrors uint64 `json:"uncorrectableErrors,omitempty"`
	// SRAMThresholdExceeded is a lasting state of the hardware.
	SRAMThresholdExceeded bool `json:"sramThresholdExceeded,omitempty"`
	// NVLinksDown are the NVLinks that are down.
	NVLinksDown []int `json:"nvlinksDown,omitempty"`
	// Fabric is the GPU's registration with Fabric Manager, if it is behind NVSwitches.
	Fabric FabricState `json:"fabric,omitempty"`
	// MIGModePends keeps a change of the MIG mode pending until a reset, also on a GPU
	// that changes it at once.
	MIGModePends bool `json:"migModePends,omitempty"`
	// NodeMissing means that there is no /dev/nvidiaN of the GPU, and nvidia-modprobe
	// can't make it. NVML still answers for the GPU (assumed). Only Heal ends it.
	NodeMissing bool `json:"nodeMissing,omitempty"`
	// CapabilitiesMissing means that the driver lists no device nodes for access to the
	// GPU's MIG instances. Only Heal ends it.
	CapabilitiesMissing bool `json:"capabilitiesMissing,omitempty"`
}

// RemappedRows is nvmlDeviceGetRemappedRows.
type RemappedRows struct {
	Correctable   uint32 `json:"correctable,omitempty"`
	Uncorrectable uint32 `json:"uncorrectable,omitempty"`
	Pending       bool   `json:"pending,omitempty"`
	Failed        bool   `json:"failed,omitempty"`
}

// RecoveryAction is nvmlDeviceGpuRecoveryAction_t.
type RecoveryAction uint32

// Some actions. A reset ends the first of these, and none of the others.
const (
	gpuReset          RecoveryAction = 1
	nodeReboot        RecoveryAction = 2
	recoverIMEXDomain RecoveryAction = 5
	busReset          RecoveryAction = 6
	systemReboot      RecoveryAction = 7
)

// String returns the action in the words of nvidia-smi; of those that are newer
// than driver 580, which has five, the words are assumed.
func (a RecoveryAction) String() string {
	names := [...]string{"None", "Reset", "Reboot", "Drain P2P", "Drain and Reset", "Recover IMEX Domain", "Bus Reset", "System Reboot"}
	if int(a) >= len(names) {
		return "Unknown"
	}
	return names[a]
}

// inKernelLog returns the action in the words of the driver's messages.
func (a RecoveryAction) inKernelLog() string {
	words := map[RecoveryAction]string{gpuReset: "GPU Reset Required", nodeReboot: "Node Reboot Required"}
	return cmp.Or(words[a], a.String())
}

// afterReset returns the state after a reset of the GPU: pending rows are
// remapped, and NVLinks trained again. Actions that need more than a reset stay,
// and so do the mark of worn SRAM, the registration with Fabric Manager, and files
// that are missing.
func (h Health) afterReset() Health {
	after := Health{
		RemappedRows: h.RemappedRows, SRAMThresholdExceeded: h.SRAMThresholdExceeded, Fabric: h.Fabric,
		NodeMissing: h.NodeMissing, CapabilitiesMissing: h.CapabilitiesMissing,
	}
	after.RemappedRows.Pending = false
	if slices.Contains([]RecoveryAction{nodeReboot, recoverIMEXDomain, busReset, systemReboot}, h.RecoveryAction) {
		after.RecoveryAction = h.RecoveryAction
	}
	return after
}

// afterReload returns the state after the driver was loaded again, which resets
// the GPUs that it can reach.
func (h Health) afterReload() Health {
	if h.Lost || h.Wedged {
		return h
	}
	return h.afterReset()
}

// afterReboot returns the state after a reboot of the machine.
func (h Health) afterReboot() Health {
	after := h.afterReset()
	after.RecoveryAction, after.Fabric = 0, FabricReady // the service is started
	return after
}

// XID is an error that a GPU reports.
type XID struct {
	// Code is the number in NVIDIA's catalog.
	Code uint64
	// GPUInstance and ComputeInstance are nil unless the error belongs to one.
	GPUInstance, ComputeInstance *uint32
	// PID, 0 if unknown, and Name are those of the process at fault. Only the kernel
	// log has them.
	PID  uint32
	Name string
}

// RaiseXID makes a GPU (by position) report an XID: as an event, and in the
// kernel log.
func (m *Machine) RaiseXID(gpu int, x XID) error {
	return m.updateGPU(gpu, func(s *State, g *GPUState) error {
		if !g.hasInstance(x.GPUInstance, x.ComputeInstance) {
			return fmt.Errorf("XID %d: GPU %d doesn't have the instance: %w", x.Code, gpu, NotFound)
		}
		return m.addXID(s, gpu, x, xidText(x))
	})
}

func (m *Machine) addXID(s *State, gpu int, x XID, texts []string) error {
	e := xidEvent(gpu, x.Code)
	if x.GPUInstance != nil {
		e.GPUInstance = *x.GPUInstance
	}
	if x.ComputeInstance != nil {
		e.ComputeInstance = *x.ComputeInstance
	}
	s.addEvent(e)
	return m.logXID(s, gpu, x, texts)
}

// addHealthEvent adds an event that belongs to no instance.
func (s *State) addHealthEvent(gpu int, t EventType) {
	s.addEvent(Event{GPU: gpu, Type: t, GPUInstance: NoInstance, ComputeInstance: NoInstance})
}

// SetRecoveryAction changes the recovery action of a GPU (by position). The GPU
// reports that with XID 154 and an event.
func (m *Machine) SetRecoveryAction(gpu int, action RecoveryAction) error {
	return m.updateGPU(gpu, func(s *State, g *GPUState) error { return m.setRecoveryAction(s, gpu, g, action) })
}

func (m *Machine) setRecoveryAction(s *State, gpu int, g *GPUState, action RecoveryAction) error {
	before := g.RecoveryAction
	if before == action {
		return nil
	}
	g.RecoveryAction = action
	s.addHealthEvent(gpu, GPURecoveryAction)
	return m.addXID(s, gpu, XID{Code: 154}, []string{fmt.Sprintf("GPU recovery action changed from 0x%x (%s) to 0x%x (%s)",
		uint32(before), before.inKernelLog(), uint32(action), action.inKernelLog())})
}

// Lose makes a GPU (by position) fall off the bus, with XID 79 and the event
// that hardware sends then. Only Reboot and Heal bring it back.
func (m *Machine) Lose(gpu int) error {
	return m.updateGPU(gpu, func(s *State, g *GPUState) error {
		if g.Lost {
			return nil
		}
		g.Lost = true
		s.addHealthEvent(gpu, GPUUnavailable)
		x := XID{Code: 79}
		return m.addXID(s, gpu, x, xidText(x))
	})
}

// SetRemappedRows sets the row remapper of a GPU (by position), with the event
// of a remapping.
func (m *Machine) SetRemappedRows(gpu int, pending, failed bool) error {
	return m.updateGPU(gpu, func(s *State, g *GPUState) error {
		r := &g.RemappedRows
		switch {
		case failed && !r.Failed:
			s.addHealthEvent(gpu, DRAMRetirementFailure)
		case pending && !r.Pending:
			s.addHealthEvent(gpu, DRAMRetirement)
		}
		r.Pending, r.Failed = pending, failed
		return nil
	})
}

// SetUncorrectableErrors sets the errors of a GPU's memory (by position), with
// an event.
func (m *Machine) SetUncorrectableErrors(gpu int, n uint64) error {
	return m.updateGPU(gpu, func(s *State, g *GPUState) error {
		if n > g.UncorrectableErrors {
			s.addHealthEvent(gpu, DoubleBitECCError)
		}
		g.UncorrectableErrors = n
		return nil
	})
}

// Heal makes a GPU (by position) healthy, as no real GPU heals, with the event
// of the recovery action if there was one.
func (m *Machine) Heal(gpu int) error {
	return m.updateGPU(gpu, func(s *State, g *GPUState) error {
		if err := m.setRecoveryAction(s, gpu, g, 0); err != nil {
			return err
		}
		g.Health = Health{}
		return nil
	})
}

func (s *GPUState) hasInstance(gpuInstance, computeInstance *uint32) bool {
	switch {
	case gpuInstance == nil:
		return computeInstance == nil
	case computeInstance != nil:
		return s.hasMIGDevice(*gpuInstance, *computeInstance)
	}
	return slices.ContainsFunc(s.Instances, func(i GPUInstance) bool { return i.ID == *gpuInstance })
}
