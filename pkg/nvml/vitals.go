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
// doesn't have, or that can't be read, stays unknown. If the driver refuses calls because the GPU needs
// a reset, Vitals returns that as the recovery action, and nothing else. It
// returns ErrLost if the GPU doesn't answer or isn't listed, and
// ErrNotResponding.
func (s *Session) Vitals(uuid gpu.UUID) (gpu.Vitals, error) {
	v, err := onGPU(s, uuid, "read its vitals", s.limits.read, func(handle gonvml.Device, object string) (gpu.Vitals, error) {
		return s.readVitals(handle, uuid, object)
	})
	if errors.Is(err, gonvml.ERROR_RESET_REQUIRED) {
		return gpu.Vitals{Recovery: gpu.RecoveryReset}, nil
	}
	return v, err
}

// readVitals reads what can be read: a call that fails in another way than by a GPU that
// is gone leaves its value unknown, and must not hide the others.
func (s *Session) readVitals(handle gonvml.Device, uuid gpu.UUID, object string) (v gpu.Vitals, err error) {
	if v.Recovery, err = readRecovery(handle, object); err != nil {
		return gpu.Vitals{}, err
	}
	var errs [4]error
	v.RowRemap, errs[0] = readRowRemap(handle, object)
	v.UncorrectableErrors, errs[1] = readUncorrectable(handle, object)
	v.SRAMThresholdExceeded, errs[2] = s.readSRAMThreshold(handle, object)
	v.NVLinksUp, v.NVLinksDown, errs[3] = s.readLinks(handle, uuid, object)
	for _, err := range errs {
		if errors.Is(err, ErrLost) || errors.Is(err, ErrNotResponding) {
			return gpu.Vitals{}, err
		}
	}
	return v, nil
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
		return gpu.RecoveryUnknown, nil
	}
	err := wrap(ret, "nvmlDeviceGetFieldValues", "(GPU recovery action) "+object)
	if errors.Is(err, ErrNotSupported) {
		return gpu.RecoveryUnknown, nil
	}
	if err != nil {
		return gpu.RecoveryUnknown, err
	}
	value, err := unsigned(fields[0])
	if err != nil {
		return gpu.RecoveryUnknown, fmt.Errorf("nvmlDeviceGetFieldValues (GPU recovery action) %s: %w", object, err)
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

func readRowRemap(handle gonvml.Device, object string) (*gpu.RowRemap, error) {
	_, _, pending, failed, ret := handle.GetRemappedRows()
	err := wrap(ret, "nvmlDeviceGetRemappedRows", object)
	if errors.Is(err, ErrNotSupported) {
		return nil, nil //nolint:nilnil // nil is the documented value for "unknown"
	}
	if err != nil {
		return nil, err
	}
	return &gpu.RowRemap{Pending: pending, Failed: failed}, nil
}

func readUncorrectable(handle gonvml.Device, object string) (*uint64, error) {
	count, ret := handle.GetTotalEccErrors(gonvml.MEMORY_ERROR_TYPE_UNCORRECTED, gonvml.VOLATILE_ECC)
	err := wrap(ret, "nvmlDeviceGetTotalEccErrors", object)
	if errors.Is(err, ErrNotSupported) {
		return nil, nil //nolint:nilnil // nil is the documented value for "not counted"
	}
	if err != nil {
		return nil, err
	}
	return &count, nil
}

func (s *Session) readSRAMThreshold(handle gonvml.Device, object string) (bool, error) {
	if !s.has[callSRAMErrors] {
		return false, nil
	}
	status, ret := handle.GetSramEccErrorStatus()
	err := wrap(ret, callSRAMErrors, object)
	if errors.Is(err, ErrNotSupported) {
		return false, nil
	}
	return status.BThresholdExceeded != 0, err
}

// readLinks returns the links that this session has seen active, by their state
// now. None in MIG mode, in which links may be off.
func (s *Session) readLinks(handle gonvml.Device, uuid gpu.UUID, object string) (up, down []int, err error) {
	current, pending, ret := handle.GetMigMode()
	if ret == gonvml.SUCCESS && (current == gonvml.DEVICE_MIG_ENABLE || pending == gonvml.DEVICE_MIG_ENABLE) {
		return nil, nil, nil
	}
	known, _ := s.nvlinks.known(uuid)
	for _, link := range slices.Sorted(maps.Keys(known)) {
		state, ret := handle.GetNvLinkState(link)
		err := wrap(ret, "nvmlDeviceGetNvLinkState", fmt.Sprintf("(link %d) %s", link, object))
		switch {
		case errors.Is(err, ErrNotSupported): // the driver doesn't know the link's state now
		case err != nil:
			return nil, nil, err
		case state == gonvml.FEATURE_ENABLED:
			up = append(up, link)
		default:
			down = append(down, link)
		}
	}
	return up, down, nil
}
