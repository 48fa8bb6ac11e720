package claim

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// checkConfig refuses a configuration for this driver that applies to the
// result.
func checkConfig(configs []resourceapi.DeviceAllocationConfiguration, driver string, result resourceapi.DeviceRequestAllocationResult) error {
	for _, c := range resourceclaim.ConfigForResult(configs, result) {
		if c.Opaque.Driver == driver {
			return fmt.Errorf("this version takes no claim configuration; remove it from the %s; %w", sourceName(c.Source), ErrPermanent)
		}
	}
	return nil
}

// sourceName says where a user finds the configuration.
func sourceName(source resourceapi.AllocationConfigSource) string {
	if source == resourceapi.AllocationConfigSourceClass {
		return "DeviceClass"
	}
	return "ResourceClaim"
}
