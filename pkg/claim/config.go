package claim

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tessera-dra/tessera/api/resource/v1beta1"
)

// checkConfig refuses a result whose configuration this driver can't read or
// honour. The configurations of the device class come first, then those of
// the claim; the last one that applies to the result counts.
func checkConfig(configs []resourceapi.DeviceAllocationConfiguration, driver string, result resourceapi.DeviceRequestAllocationResult) error {
	var effective *v1beta1.GpuConfig
	var from resourceapi.AllocationConfigSource
	for _, c := range byPrecedence(resourceclaim.ConfigForResult(configs, result)) {
		if c.Opaque.Driver != driver {
			continue
		}
		config, err := v1beta1.Decode(c.Opaque.Parameters.Raw)
		if err != nil {
			return permanent(c.Source, err)
		}
		switch config := config.(type) {
		case *v1beta1.GpuConfig:
			effective, from = config, c.Source
		case *v1beta1.MigDeviceConfig:
			if len(c.Requests) > 0 {
				return permanent(c.Source, fmt.Errorf("%s is for MIG devices, and device %q is a whole GPU: use %s, or address it to another request",
					v1beta1.MigDeviceConfigKind, result.Device, v1beta1.GpuConfigKind))
			}
		}
	}
	if effective != nil && effective.Sharing != nil {
		return permanent(from, fmt.Errorf("sharing.strategy %s isn't supported by this version of the driver for a whole GPU; containers and pods that use one claim share its GPUs without it",
			effective.Sharing.Strategy))
	}
	return nil
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
