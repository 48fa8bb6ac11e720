package claim

import (
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/api/resource/v1beta1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// MPS holds the settings of a configuration with strategy MPS. Limits are of
// each client; 0: no limit.
type MPS struct {
	// ThreadPercentage as in gpu.Limits.
	ThreadPercentage int
	// MemoryMiB on every device.
	MemoryMiB int64
	// PerDevice is MemoryMiB on single devices, and wins over it. A device is named
	// by the GPU's UUID, or by its index among the claim's devices that have MPS by
	// configuration, in the order of the allocation.
	PerDevice map[string]int64
	// Source is where the configuration is.
	Source resourceapi.AllocationConfigSource
}

// effective is the configuration that counts for a result.
type effective struct {
	mps         *MPS
	timeSlice   v1beta1.TimeSliceInterval
	ineffective bool
}

// configFor finds the configuration that counts for a result of the allocation: as with
// NVIDIA's driver the last one that is for the request, or for all requests and of the
// right kind for the device. Configurations of the device class come first, then those of
// the claim. It refuses one that this driver can't read, whichever counts, and one that
// counts and has values that aren't valid, is of the wrong kind, or can't be honoured.
func configFor(allocation resourceapi.DeviceAllocationResult, driver string, result resourceapi.DeviceRequestAllocationResult) (effective, error) {
	counts, found := effective{}, false
	for _, c := range slices.Backward(byPrecedence(resourceclaim.ConfigForResult(allocation.Config, result))) {
		if c.Opaque.Driver != driver {
			continue
		}
		config, err := v1beta1.Decode(c.Opaque.Parameters.Raw)
		if err == nil && !found {
			counts, found, err = honour(config, c, allocation, driver, gpu.DeviceName(result.Device))
		}
		if err != nil {
			return effective{}, permanent(c.Source, err)
		}
	}
	return counts, nil
}

// honour reads a configuration for a device. It returns false for one that is for all
// requests and means other devices.
func honour(
	config v1beta1.Config, c resourceapi.DeviceAllocationConfiguration,
	allocation resourceapi.DeviceAllocationResult, driver string, device gpu.DeviceName,
) (_ effective, counts bool, _ error) {
	addressed := len(c.Requests) > 0
	if !isFor(config, device) {
		if addressed {
			return effective{}, false, wrongKind(config, device)
		}
		return effective{}, false, nil
	}
	if errs := config.Validate(); len(errs) > 0 {
		return effective{}, false, fmt.Errorf("%s: %w", kindOf(config), errs.ToAggregate())
	}
	e := read(config, c.Source)
	strategy := e.strategy()
	problem := impossible(strategy, device)
	switch {
	case problem == nil:
		return e, true, nil
	case !addressed && meansAnother(allocation, driver, strategy):
		return effective{}, false, nil
	default:
		return effective{}, false, fmt.Errorf("sharing.strategy %s isn't for device %q: %w", strategy, device, problem)
	}
}

// isFor reports whether a configuration is of the kind for the device. A share of a
// partition can be configured as either.
func isFor(config v1beta1.Config, device gpu.DeviceName) bool {
	switch config.(type) {
	case *v1beta1.GpuConfig:
		return !device.IsPartition() || device.IsShare()
	case *v1beta1.MigDeviceConfig:
		return device.IsPartition()
	case *v1beta1.VfioDeviceConfig:
	}
	return false
}

func kindOf(config v1beta1.Config) string { return config.GetObjectKind().GroupVersionKind().Kind }

// strategy returns the strategy by which the device is to be shared; empty for none.
func (e effective) strategy() v1beta1.SharingStrategy {
	switch {
	case e.mps != nil:
		return v1beta1.MPSStrategy
	case e.timeSlice != "":
		return v1beta1.TimeSlicingStrategy
	default:
		return ""
	}
}

// impossible says why a device can't be shared with a strategy; nil where it
// can.
func impossible(strategy v1beta1.SharingStrategy, device gpu.DeviceName) error {
	switch {
	case strategy == v1beta1.TimeSlicingStrategy && device.IsShare():
		return errors.New("it is an MPS share, whose processes run beside those of other claims: leave sharing out, or ask for a whole GPU")
	case strategy == v1beta1.TimeSlicingStrategy && device.IsReplica():
		return errors.New("it is one of several replicas of a GPU, which have one time slice together: leave sharing out, and set the interval in the SharingPolicy")
	case strategy == v1beta1.MPSStrategy && device.IsReplica():
		return errors.New("it is a time-sliced replica, whose GPU other claims have too: leave sharing out, or ask for an MPS share (DeviceClass mps.gpu.nvidia.com)")
	default:
		return nil
	}
}

// meansAnother reports whether a configuration that is for all requests may mean
// another device of the claim.
func meansAnother(allocation resourceapi.DeviceAllocationResult, driver string, strategy v1beta1.SharingStrategy) bool {
	return slices.ContainsFunc(allocation.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		device := gpu.DeviceName(r.Device)
		return r.Driver == driver && !device.IsPartition() && impossible(strategy, device) == nil
	})
}

// read returns the parameters of a valid configuration.
func read(config v1beta1.Config, source resourceapi.AllocationConfigSource) effective {
	switch config := config.(type) {
	case *v1beta1.GpuConfig:
		s := config.Sharing
		switch {
		case s == nil:
		case s.Strategy == v1beta1.MPSStrategy:
			return effective{mps: readMPS(s.MpsConfig, source)}
		case s.TimeSlicingConfig != nil:
			return effective{timeSlice: *s.TimeSlicingConfig.Interval}
		default:
			return effective{timeSlice: v1beta1.DefaultTimeSlice}
		}
	case *v1beta1.MigDeviceConfig:
		s := config.Sharing
		switch {
		case s == nil:
		case s.Strategy == v1beta1.MPSStrategy:
			return effective{mps: readMPS(s.MpsConfig, source)}
		default:
			return effective{ineffective: true}
		}
	case *v1beta1.VfioDeviceConfig:
	}
	return effective{}
}

// readMPS: multiUser has nothing to say, since every daemon serves all users.
func readMPS(c *v1beta1.MpsConfig, source resourceapi.AllocationConfigSource) *MPS {
	m := &MPS{Source: source}
	if c == nil {
		return m
	}
	if c.DefaultActiveThreadPercentage != nil {
		m.ThreadPercentage = *c.DefaultActiveThreadPercentage
	}
	if q := c.DefaultPinnedDeviceMemoryLimit; q != nil {
		m.MemoryMiB = mebibytes(*q)
	}
	for device, q := range c.DefaultPerDevicePinnedMemoryLimit {
		if m.PerDevice == nil {
			m.PerDevice = map[string]int64{}
		}
		m.PerDevice[device] = mebibytes(q)
	}
	return m
}

// wrongKind says which kind of configuration is for which kind of device.
func wrongKind(config v1beta1.Config, device gpu.DeviceName) error {
	want := v1beta1.GpuConfigKind
	if device.IsPartition() {
		want = v1beta1.MigDeviceConfigKind
	}
	return fmt.Errorf("%s isn't for device %q, which is %s: use %s, or address it to another request", kindOf(config), device, describeKind(device), want)
}

// describeKind returns the kind of device in words.
func describeKind(device gpu.DeviceName) string {
	switch {
	case device.IsShare() && device.IsPartition():
		return "an MPS share of a MIG partition"
	case device.IsShare():
		return "an MPS share of a GPU"
	case device.IsReplica():
		return "a time-sliced replica of a GPU"
	case device.IsPartition():
		return "a MIG partition"
	default:
		return "a whole GPU"
	}
}

// byPrecedence puts class configurations before claim configurations, and
// keeps the order otherwise.
func byPrecedence(configs []resourceapi.DeviceAllocationConfiguration) []resourceapi.DeviceAllocationConfiguration {
	rank := func(c resourceapi.DeviceAllocationConfiguration) int {
		if c.Source == resourceapi.AllocationConfigSourceClass {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(configs, func(a, b resourceapi.DeviceAllocationConfiguration) int { return rank(a) - rank(b) })
	return configs
}

// permanent says where a user finds the configuration, and that it has to
// change.
func permanent(source resourceapi.AllocationConfigSource, err error) error {
	where := "ResourceClaim, or the template it was made from"
	if source == resourceapi.AllocationConfigSourceClass {
		where = "DeviceClass"
	}
	return fmt.Errorf("%w: configuration in the %s: %w; correct it there and create the claim again", ErrPermanent, where, err)
}

// Refuse returns the error for a configuration that requests more than the
// devices of the claim have: an ErrPermanent that names the place of the
// configuration.
func (m *MPS) Refuse(err error) error { return permanent(m.Source, err) }
