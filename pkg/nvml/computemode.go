package nvml

import (
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// ComputeMode determines which processes may use a GPU. It doesn't survive a
// reboot: the driver starts with ComputeDefault.
type ComputeMode string

const (
	// ComputeDefault admits any number of processes.
	ComputeDefault ComputeMode = "default"
	// ComputeExclusiveThread is a mode of old drivers; it can be read, but not
	// set.
	ComputeExclusiveThread ComputeMode = "exclusive-thread"
	// ComputeProhibited admits no process.
	ComputeProhibited ComputeMode = "prohibited"
	// ComputeExclusiveProcess admits one process, such as an MPS server for its
	// clients.
	ComputeExclusiveProcess ComputeMode = "exclusive-process"
)

// ComputeMode reads the GPU's mode. It returns ErrNotSupported if the GPU has
// none, ErrLost if the GPU doesn't answer or isn't listed, and
// ErrNotResponding.
func (s *Session) ComputeMode(uuid gpu.UUID) (ComputeMode, error) {
	return onGPU(s, uuid, reads, "read the compute mode", s.limits.read, readComputeMode)
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
		return "", fmt.Errorf("nvmlDeviceGetComputeMode %s: the mode is %d, which is unknown: %w", object, mode, ErrNotSupported)
	}
}

// SetComputeMode sets the GPU's mode, which takes effect at once. Processes
// that use the GPU already continue in any mode. It is idempotent. It returns
// ErrNotSupported if the GPU has no modes, or not this one, or is in MIG mode;
// ErrNoPermission unless called by root; ErrLost and ErrNotResponding as
// ComputeMode does.
func (s *Session) SetComputeMode(uuid gpu.UUID, mode ComputeMode) error {
	value, err := computeModeValue(mode)
	if err != nil {
		return fmt.Errorf("set the compute mode of GPU %s: %w", uuid, err)
	}
	return s.change(uuid, "set the compute mode", func(handle gonvml.Device, object string) error {
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
		return 0, fmt.Errorf("%q is not a compute mode: %w", mode, ErrNotSupported)
	}
}
