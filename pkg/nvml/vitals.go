package nvml

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// Vitals reads the state of a GPU's health. A value that the driver or the GPU
// doesn't have, or that can't be read, stays unknown. If the driver refuses calls because
// the GPU needs a reset, Vitals returns that as the recovery action, and nothing else. It
// returns ErrLost if the GPU doesn't answer or isn't listed, and
// ErrNotResponding.
func (s *Session) Vitals(uuid gpu.UUID) (gpu.Vitals, error) {
	v, err := onGPU(s, uuid, reads, "read its vitals", s.limits.read, func(handle gonvml.Device, object string) (gpu.Vitals, error) {
		return s.readVitals(handle, uuid, object)
	})
	if err != nil && ConditionOf(err).Type == gpu.ResetRequired {
		return gpu.Vitals{Recovery: gpu.RecoveryReset}, nil
	}
	return v, err
}

func (s *Session) readVitals(handle gonvml.Device, uuid gpu.UUID, object string) (v gpu.Vitals, err error) {
	if v.Recovery, err = readRecovery(handle, object); err != nil {
		return gpu.Vitals{}, err
	}
	_, _, pending, failed, ret := handle.GetRemappedRows()
	if v.RowRemap, err = orUnknown(gpu.RowRemap{Pending: pending, Failed: failed}, ret, "nvmlDeviceGetRemappedRows", object); err != nil {
		return gpu.Vitals{}, err
	}
	if s.has[callSRAMErrors] {
		status, ret := handle.GetSramEccErrorStatus()
		if v.SRAMThresholdExceeded, err = orUnknown(status.BThresholdExceeded != 0, ret, callSRAMErrors, object); err != nil {
			return gpu.Vitals{}, err
		}
	}
	if v.NVLinksUp, v.NVLinksDown, err = s.readLinks(handle, uuid, object); err != nil {
		return gpu.Vitals{}, err
	}
	return v, nil
}

// orUnknown returns the value that a call has read; nil if the call failed, which must
// not hide the other values. It returns an error if the GPU is gone.
func orUnknown[T any](value T, ret gonvml.Return, call, object string) (*T, error) {
	err := wrap(ret, call, object)
	switch {
	case err == nil:
		return &value, nil
	case errors.Is(err, ErrLost):
		return nil, err
	default:
		return nil, nil //nolint:nilnil // nil is the documented value for "unknown"
	}
}

// readRecovery reads the field of the recovery action, which older drivers
// don't have. A driver refuses a field that it doesn't know, in the call or in the
// field's own return code.
func readRecovery(handle gonvml.Device, object string) (gpu.RecoveryAction, error) {
	fields := []gonvml.FieldValue{{FieldId: gonvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	ret := handle.GetFieldValues(fields)
	if ret == gonvml.SUCCESS {
		ret = gonvml.Return(fields[0].NvmlReturn)
	}
	if ret == gonvml.ERROR_INVALID_ARGUMENT {
		return gpu.RecoveryUnsupported, nil
	}
	err := wrap(ret, "nvmlDeviceGetFieldValues", "(GPU recovery action) "+object)
	if errors.Is(err, ErrNotSupported) {
		return gpu.RecoveryUnsupported, nil
	}
	if err != nil {
		return gpu.RecoveryUnsupported, err
	}
	value, err := unsigned(fields[0])
	if err != nil {
		return gpu.RecoveryUnsupported, fmt.Errorf("nvmlDeviceGetFieldValues (GPU recovery action) %s: %w", object, err)
	}
	return recoveryAction(value), nil
}

// unsigned returns the value of a field with an unsigned type.
func unsigned(f gonvml.FieldValue) (uint64, error) {
	switch gonvml.ValueType(f.ValueType) {
	case gonvml.VALUE_TYPE_UNSIGNED_INT:
		return uint64(binary.NativeEndian.Uint32(f.Value[:])), nil
	case gonvml.VALUE_TYPE_UNSIGNED_LONG, gonvml.VALUE_TYPE_UNSIGNED_LONG_LONG:
		return binary.NativeEndian.Uint64(f.Value[:]), nil
	case gonvml.VALUE_TYPE_UNSIGNED_SHORT:
		return uint64(binary.NativeEndian.Uint16(f.Value[:])), nil
	default:
		return 0, fmt.Errorf("the value of field %d is of type %d, want an unsigned one", f.FieldId, f.ValueType)
	}
}

func recoveryAction(value uint64) gpu.RecoveryAction {
	switch gonvml.DeviceGpuRecoveryAction(value) {
	case gonvml.GPU_RECOVERY_ACTION_NONE:
		return gpu.RecoveryNone
	case gonvml.GPU_RECOVERY_ACTION_GPU_RESET:
		return gpu.RecoveryReset
	case gonvml.GPU_RECOVERY_ACTION_NODE_REBOOT:
		return gpu.RecoveryReboot
	case gonvml.GPU_RECOVERY_ACTION_DRAIN_P2P:
		return gpu.RecoveryDrainP2P
	case gonvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:
		return gpu.RecoveryDrainAndReset
	case gonvml.GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN:
		return gpu.RecoveryIMEX
	case gonvml.GPU_RECOVERY_ACTION_BUS_RESET:
		return gpu.RecoveryBusReset
	case gonvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT:
		return gpu.RecoverySystemReboot
	default:
		return gpu.RecoveryOther
	}
}

// readLinks returns the links that this session has seen active, by their state
// now. It returns none of a GPU in MIG mode, in which links may be off, and none that leads
// directly to a GPU in MIG mode.
func (s *Session) readLinks(handle gonvml.Device, uuid gpu.UUID, object string) (up, down []int, err error) {
	current, pending, ret := handle.GetMigMode()
	if ret == gonvml.SUCCESS {
		s.noteMIGMode(uuid, current, pending)
	}
	if s.isMIGOn(uuid) {
		return nil, nil, nil
	}
	known, _ := s.knownLinks(uuid)
	for _, link := range slices.Sorted(maps.Keys(known)) {
		value, ret := handle.GetNvLinkState(link)
		state, err := orUnknown(value, ret, "nvmlDeviceGetNvLinkState", fmt.Sprintf("(link %d) %s", link, object))
		switch {
		case err != nil:
			return nil, nil, err
		case state == nil: // it is neither up nor down
		case *state == gonvml.FEATURE_ENABLED:
			up = append(up, link)
		case !s.leadsToMIG(known[link]):
			down = append(down, link)
		}
	}
	return up, down, nil
}

// leadsToMIG reports whether the other end of a link is a GPU in MIG mode. It makes no call
// for that GPU, which may not answer.
func (s *Session) leadsToMIG(end linkEnd) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uuid, g := range s.known {
		if !end.isSwitch && g.PCI == end.pci {
			return s.migOn[uuid]
		}
	}
	return false
}
