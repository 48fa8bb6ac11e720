package claim

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/api/resource/v1beta1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// checkConfig refuses a result whose configuration this driver can't read or
// honour. The configurations of the device class come first, then those of
// the claim; the last one that applies to the result counts. One of the wrong
// kind for the device is passed over where it is for all requests, since
// others may be what it means, and refused where it names this request.
func checkConfig(configs []resourceapi.DeviceAllocationConfiguration, driver string, result resourceapi.DeviceRequestAllocationResult) error {
	var effective v1beta1.SharingStrategy
	var from resourceapi.AllocationConfigSource
	for _, c := range byPrecedence(resourceclaim.ConfigForResult(configs, result)) {
		if c.Opaque.Driver != driver {
			continue
		}
		config, err := v1beta1.Decode(c.Opaque.Parameters.Raw)
		if err != nil {
			return permanent(c.Source, err)
		}
		strategy, fits := sharing(config, gpu.DeviceName(result.Device).IsPartition())
		switch {
		case fits:
			effective, from = strategy, c.Source
		case len(c.Requests) > 0:
			return permanent(c.Source, wrongKind(result))
		}
	}
	if effective != "" {
		return permanent(from, fmt.Errorf("sharing.strategy %s isn't supported by this version of the driver; containers and pods that use one claim share its devices without it",
			effective))
	}
	return nil
}

// sharing returns the strategy that a configuration asks for, empty for none,
// and whether it is one for this kind of device.
func sharing(config v1beta1.Config, partition bool) (_ v1beta1.SharingStrategy, fits bool) {
	switch config := config.(type) {
	case *v1beta1.GpuConfig:
		if config.Sharing != nil && !partition {
			return config.Sharing.Strategy, true
		}
		return "", !partition
	case *v1beta1.MigDeviceConfig:
		if config.Sharing != nil && partition {
			return config.Sharing.Strategy, true
		}
		return "", partition
	default:
		return "", false
	}
}

// wrongKind says which kind of configuration is for which kind of device.
func wrongKind(result resourceapi.DeviceRequestAllocationResult) error {
	is, got, want := "a whole GPU", v1beta1.MigDeviceConfigKind, v1beta1.GpuConfigKind
	if gpu.DeviceName(result.Device).IsPartition() {
		is, got, want = "a MIG partition", want, got
	}
	return fmt.Errorf("%s isn't for device %q, which is %s: use %s, or address it to another request", got, result.Device, is, want)
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
	return fmt.Errorf("%w: configuration in the %s: %w; correct it there and make the claim anew", ErrPermanent, where, err)
}
