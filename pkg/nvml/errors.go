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
	// ErrNotResponding: a call into the driver for this GPU has not returned, and
	// may never. Calls fail with it at once until that call has returned.
	ErrNotResponding = errors.New("GPU does not respond")
	// ErrNotSupported: this GPU or driver has no such thing, or not while its
	// MIG mode is what it is.
	ErrNotSupported = errors.New("not supported")
	// ErrInUse: processes use it, or what is part of it. The error names those
	// that NVML knows; a monitor such as DCGM may hold a GPU without being one.
	ErrInUse = errors.New("in use")
	// ErrNoPermission: the caller isn't root, or lacks the mig/config capability.
	ErrNoPermission = errors.New("no permission (MIG is root's, with the capability nvidia/capabilities/mig/config)")
	// ErrInsufficientResources: no room at that place, or no engines left.
	ErrInsufficientResources = errors.New("insufficient resources")
	// ErrNotFound: there is no such instance (any more).
	ErrNotFound = errors.New("not found")
	// ErrMismatch: something else is where the wanted instance would be.
	ErrMismatch = errors.New("another instance is there")
	// ErrNotSwitchable: the GPU's MIG mode is not one that may be switched here
	// (see gpu.MIG.Switchable).
	ErrNotSwitchable = errors.New("MIG mode can't be switched here")
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
	case gonvml.ERROR_IN_USE:
		return ErrInUse
	case gonvml.ERROR_NO_PERMISSION:
		return ErrNoPermission
	case gonvml.ERROR_INSUFFICIENT_RESOURCES:
		return ErrInsufficientResources
	case gonvml.ERROR_NOT_FOUND:
		return ErrNotFound
	default:
		return nil
	}
}
