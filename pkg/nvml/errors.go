package nvml

import (
	"errors"
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// What NVML can answer, as far as this driver tells answers apart. Every error
// of this package that comes from NVML wraps gonvml's Return, and one of these
// where it fits.
var (
	// ErrLibraryNotFound: libnvidia-ml.so.1 can't be loaded.
	ErrLibraryNotFound = errors.New("NVML library cannot be loaded")
	// ErrDriverNotLoaded: the kernel module isn't there, or not ready.
	ErrDriverNotLoaded = errors.New("NVIDIA kernel driver is not loaded")
	// ErrVersionMismatch: the kernel module and the library are of two drivers.
	ErrVersionMismatch = errors.New("the loaded kernel driver is of another version than the library: reload it, or reboot the node")
	// ErrLost: the GPU fell off the bus, or needs a reset to answer again.
	ErrLost = errors.New("GPU is lost")
	// ErrNotSupported: this GPU or driver has no such thing.
	ErrNotSupported = errors.New("not supported")
)

// wrap returns nil for SUCCESS, and otherwise an error that names the call and
// the object.
func wrap(ret gonvml.Return, call, object string) error {
	if ret == gonvml.SUCCESS {
		return nil
	}
	if object != "" {
		call += " " + object
	}
	if kind := kindOf(ret); kind != nil {
		return fmt.Errorf("%s: %w (%w)", call, kind, ret)
	}
	return fmt.Errorf("%s: %w", call, ret)
}

func kindOf(ret gonvml.Return) error {
	switch ret {
	case gonvml.ERROR_LIBRARY_NOT_FOUND:
		return ErrLibraryNotFound
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		return ErrDriverNotLoaded
	case gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return ErrVersionMismatch
	case gonvml.ERROR_GPU_IS_LOST, gonvml.ERROR_RESET_REQUIRED:
		return ErrLost
	case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND:
		return ErrNotSupported
	default:
		return nil
	}
}
