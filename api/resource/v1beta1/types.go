package v1beta1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// APIVersion of all configurations.
const APIVersion = "resource.nvidia.com/v1beta1"

// Kinds of configuration.
const (
	GpuConfigKind       = "GpuConfig"
	MigDeviceConfigKind = "MigDeviceConfig"
	// VfioDeviceConfigKind is known only so that it can be skipped: this driver has
	// no such devices.
	VfioDeviceConfigKind = "VfioDeviceConfig"
)

// Config is a *GpuConfig, a *MigDeviceConfig or a *VfioDeviceConfig.
//
//sumtype:decl
type Config interface {
	// GetObjectKind returns the configuration's kind and API version.
	GetObjectKind() schema.ObjectKind
	// Validate returns the errors in the configuration's values, by field.
	Validate() field.ErrorList
	isConfig()
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

// VfioDeviceConfig configures GPUs that NVIDIA's driver passes through to virtual
// machines. In a claim for all requests it is no concern of the devices here.
type VfioDeviceConfig struct {
	metav1.TypeMeta `json:",inline"`
	Iommu           any `json:"iommu,omitempty"`
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

// MigDeviceSharing is a strategy and its parameters. TimeSlicing is valid and has no
// effect: the hardware can't time-slice a MIG device otherwise than it does anyway.
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

// MpsConfig are the parameters of MPS; without any, there are no limits.
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
