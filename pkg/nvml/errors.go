package nvml

import (
	"context"
	"errors"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// The answers of NVML that this driver distinguishes. Every error of this
// package that comes from NVML wraps gonvml's Return, and one of these if it
// applies.
var (
	// ErrLibraryNotFound means that libnvidia-ml.so.1 can't be loaded.
	ErrLibraryNotFound = errors.New("NVML library cannot be loaded")
	// ErrDriverNotLoaded means that the kernel module isn't loaded, or not ready.
	ErrDriverNotLoaded = errors.New("NVIDIA kernel driver is not loaded")
	// ErrVersionMismatch means that the kernel module and the library are of
	// different driver versions.
	ErrVersionMismatch = errors.New("the loaded kernel driver has another version than the library: reload it, or reboot the node")
	// ErrLost means that the GPU fell off the bus, or needs a reset to answer
	// again.
	ErrLost = errors.New("GPU is lost")
	// ErrNotResponding means that a call into the driver for this GPU has not
	// returned, and may never return. Until it does, further calls fail with this
	// error at once.
	ErrNotResponding = errors.New("GPU does not respond")
	// ErrNotSupported means that this GPU or driver doesn't have the feature, or
	// not in the current MIG mode.
	ErrNotSupported = errors.New("not supported")
	// ErrInUse means that processes use the object or a part of it. The error
	// names the processes that NVML lists; a monitor such as DCGM may hold a GPU
	// without being listed.
	ErrInUse = errors.New("in use")
	// ErrNoPermission means that the caller isn't root, or lacks the mig/config
	// capability.
	ErrNoPermission = errors.New("no permission (MIG is root's, with the capability nvidia/capabilities/mig/config)")
	// ErrInsufficientResources means that there is no room at the placement, or no
	// engines are left.
	ErrInsufficientResources = errors.New("insufficient resources")
	// ErrNotFound means that there is no such instance, or no longer.
	ErrNotFound = errors.New("not found")
	// ErrMismatch means that another instance is in the place of the expected one.
	ErrMismatch = errors.New("another instance is there")
	// ErrNotSwitchable means that this driver may not switch the GPU's MIG mode
	// (see gpu.MIG.Switchable).
	ErrNotSwitchable = errors.New("MIG mode can't be switched here")
)

// ConditionOf returns the condition of a GPU for which a call has failed: a GPU that refuses
// calls until it is reset isn't lost, and one whose error says none of that is Unreadable. It is
// the one place that decides so, for the facts and for the health of a GPU.
func ConditionOf(err error) gpu.Condition {
	c := gpu.Condition{Type: gpu.Unreadable, Message: err.Error()}
	switch {
	case errors.Is(err, gonvml.ERROR_RESET_REQUIRED):
		c.Type = gpu.ResetRequired
	case errors.Is(err, ErrLost):
		c.Type = gpu.Lost
	case errors.Is(err, ErrNotResponding):
		c.Type = gpu.NotResponding
	}
	return c
}

// IsRefusal reports whether the error of a call that changes a GPU is the GPU's own: it refuses
// what others would do. The GPU isn't lost and answers, and the driver works.
func IsRefusal(err error) bool {
	for _, other := range []error{
		nil, ErrLost, ErrNotResponding, ErrNoPermission, ErrLibraryNotFound, ErrDriverNotLoaded, ErrVersionMismatch,
		gonvml.ERROR_UNINITIALIZED, gpu.ErrNoDriver, context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, other) {
			return false
		}
	}
	return true
}
