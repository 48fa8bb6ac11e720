package v1beta1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// APIVersion of all configurations.
const APIVersion = "resource.nvidia.com/v1beta1"

// Kinds of configuration.
const (
	GpuConfigKind       = "GpuConfig"
	MigDeviceConfigKind = "MigDeviceConfig"
)

// Config is a *GpuConfig or a *MigDeviceConfig.
//
//sumtype:decl
type Config interface {
	// Validate returns the errors in the configuration's form, by field.
	Validate() field.ErrorList
	setDefaults()
}

// GpuConfig says how the consumers of one claim share its whole GPUs.
type GpuConfig struct {
	metav1.TypeMeta `json:",inline"`
	// Sharing is nil where the claim wants no change: consumers of one claim
	// run as processes of one pod would.
	Sharing *GpuSharing `json:"sharing,omitempty"`
}

// MigDeviceConfig says how the consumers of one claim share its MIG devices.
type MigDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`
	Sharing         *MigDeviceSharing `json:"sharing,omitempty"`
}

// SharingStrategy is a way to share a device.
type SharingStrategy string

const (
	// TimeSlicingStrategy lets processes take turns.
	TimeSlicingStrategy SharingStrategy = "TimeSlicing"
	// MPSStrategy lets processes run side by side (CUDA Multi-Process Service).
	MPSStrategy SharingStrategy = "MPS"
)

// GpuSharing is a strategy and its parameters.
type GpuSharing struct {
	Strategy SharingStrategy `json:"strategy"`
	// TimeSlicingConfig goes with TimeSlicing only; default: interval Default.
	TimeSlicingConfig *TimeSlicingConfig `json:"timeSlicingConfig,omitempty"`
	// MpsConfig goes with MPS only; default: no limits.
	MpsConfig *MpsConfig `json:"mpsConfig,omitempty"`
}

// MigDeviceSharing is a strategy and its parameters. A MIG device can't be
// time-sliced, so MPS is the only strategy.
type MigDeviceSharing struct {
	Strategy  SharingStrategy `json:"strategy"`
	MpsConfig *MpsConfig      `json:"mpsConfig,omitempty"`
}

// TimeSliceInterval is how long a process may run before the next takes its
// turn.
type TimeSliceInterval string

// Intervals, as nvidia-smi compute-policy --set-timeslice names them.
const (
	DefaultTimeSlice TimeSliceInterval = "Default"
	ShortTimeSlice   TimeSliceInterval = "Short"
	MediumTimeSlice  TimeSliceInterval = "Medium"
	LongTimeSlice    TimeSliceInterval = "Long"
)

// TimeSlicingConfig are the parameters of TimeSlicing.
type TimeSlicingConfig struct {
	Interval *TimeSliceInterval `json:"interval,omitempty"`
}

// MpsConfig are the parameters of MPS. At least one must be given.
type MpsConfig struct {
	// DefaultActiveThreadPercentage is the part of the GPU's threads that each
	// client may use, 0 to 100.
	DefaultActiveThreadPercentage *int `json:"defaultActiveThreadPercentage,omitempty"`
	// DefaultPinnedDeviceMemoryLimit bounds each client's memory on every
	// device.
	DefaultPinnedDeviceMemoryLimit *resource.Quantity `json:"defaultPinnedDeviceMemoryLimit,omitempty"`
	// DefaultPerDevicePinnedMemoryLimit bounds it on single devices, named by
	// UUID or by their index in the claim.
	DefaultPerDevicePinnedMemoryLimit map[string]resource.Quantity `json:"defaultPerDevicePinnedMemoryLimit,omitempty"`
	// MultiUser lets processes of different users be clients at once.
	MultiUser *bool `json:"multiUser,omitempty"`
}
