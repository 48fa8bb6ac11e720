package nvml

import (
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// ComputeMode says which processes may use a GPU. It is of this boot only: the
// driver starts with ComputeDefault.
type ComputeMode string

const (
	// ComputeDefault: as many processes as like.
	ComputeDefault ComputeMode = "default"
	// ComputeExclusiveThread is of old drivers; it can be read, and not be set.
	ComputeExclusiveThread ComputeMode = "exclusive-thread"
	// ComputeProhibited: no process.
	ComputeProhibited ComputeMode = "prohibited"
	// ComputeExclusiveProcess: one process, such as an MPS server for its clients.
	ComputeExclusiveProcess ComputeMode = "exclusive-process"
)

// ComputeMode reads the GPU's mode. ErrNotSupported where it has none, ErrLost
// for one that doesn't answer or isn't listed, ErrNotResponding.
func (s *Session) ComputeMode(uuid gpu.UUID) (ComputeMode, error) {
	return onGPU(s, uuid, "read the compute mode", s.limits.read, readComputeMode)
}

func readComputeMode(handle gonvml.Device, object string) (ComputeMode, error) {
	mode, ret := handle.GetComputeMode()
	if err := wrap(ret, "nvmlDeviceGetComputeMode", object); err != nil {
		return "", err
	}
	switch mode {
	case gonvml.COMPUTEMODE_DEFAULT:
		return ComputeDefault, nil
	case gonvml.COMPUTEMODE_EXCLUSIVE_THREAD:
		return ComputeExclusiveThread, nil
	case gonvml.COMPUTEMODE_PROHIBITED:
		return ComputeProhibited, nil
	case gonvml.COMPUTEMODE_EXCLUSIVE_PROCESS:
		return ComputeExclusiveProcess, nil
	default:
		return "", fmt.Errorf("nvmlDeviceGetComputeMode %s: the mode is %d, which has no name here: %w", object, mode, ErrNotSupported)
	}
}

// SetComputeMode sets the GPU's mode, at once. Processes that use the GPU
// already go on, whatever the mode. Idempotent. ErrNotSupported where the GPU has
// none, or not this one, or is in MIG mode; ErrNoPermission for others than
// root; ErrLost and ErrNotResponding as ComputeMode.
func (s *Session) SetComputeMode(uuid gpu.UUID, mode ComputeMode) error {
	value, err := computeModeValue(mode)
	if err != nil {
		return fmt.Errorf("set the compute mode of GPU %s: %w", uuid, err)
	}
	return change(s, uuid, "set the compute mode", func(handle gonvml.Device, object string) error {
		return wrap(handle.SetComputeMode(value), "nvmlDeviceSetComputeMode", fmt.Sprintf("%s %s", mode, object))
	})
}

func computeModeValue(mode ComputeMode) (gonvml.ComputeMode, error) {
	switch mode {
	case ComputeDefault:
		return gonvml.COMPUTEMODE_DEFAULT, nil
	case ComputeProhibited:
		return gonvml.COMPUTEMODE_PROHIBITED, nil
	case ComputeExclusiveProcess:
		return gonvml.COMPUTEMODE_EXCLUSIVE_PROCESS, nil
	case ComputeExclusiveThread:
		return 0, fmt.Errorf("%s: %w", mode, ErrNotSupported)
	default:
		return 0, fmt.Errorf("%q is none: %w", mode, ErrNotSupported)
	}
}
