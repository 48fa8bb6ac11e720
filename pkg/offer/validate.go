package offer

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// The maximum size of a GPU's MIG tables. Real ones have up to 12 memory slices
// and 30 placements. They come from an object that each node's plugin writes;
// no content of it may use up the controller's memory, or affect the node's
// other GPUs.
const (
	maxGPUs   = 128 // as in the schema of GPUInventory; real nodes have up to 16
	maxSlices = 24
	maxPlaces = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures - 1 // and the whole GPU
	maxUnits  = 10000
)

// validateMIG returns an error that names the inconsistent part of a GPU's MIG tables.
func validateMIG(names *gpu.Names, g gpu.GPU) error {
	if g.MIG == nil {
		return nil
	}
	seen := make(map[gpu.DeviceName]bool)
	for _, p := range g.MIG.Profiles {
		if err := validateUnits(p); err != nil {
			return fmt.Errorf("profile %s: %w", p.Name, err)
		}
		for _, at := range p.Placements {
			if err := validatePlacement(at); err != nil {
				return fmt.Errorf("profile %s: %w", p.Name, err)
			}
			name, _ := names.Name(gpu.Partition{GPU: g.UUID, Profile: p.Name, Placement: at})
			switch {
			case seen[name]:
				return fmt.Errorf("profile %s: two partitions would be called %s", p.Name, name)
			case len(validation.IsDNS1123Label(string(name))) > 0:
				return fmt.Errorf("profile %q: a partition can't be called %s", p.Name, name)
			}
			seen[name] = true
		}
	}
	if len(seen) > maxPlaces {
		return fmt.Errorf("%d places for partitions", len(seen))
	}
	return validateInstances(g.MIG.Instances)
}

func validateInstances(all []gpu.Instance) error {
	for n, i := range all {
		if err := validatePlacement(i.Placement); err != nil {
			return fmt.Errorf("GPU instance %d: %w", i.GPUInstanceID, err)
		}
		for _, before := range all[:n] {
			if i.Placement.Overlaps(before.Placement) {
				return fmt.Errorf("GPU instances %d and %d overlap", before.GPUInstanceID, i.GPUInstanceID)
			}
		}
	}
	return nil
}

func validateUnits(p gpu.Profile) error {
	if p.MaxInstances < 0 || p.MaxInstances > maxUnits {
		return fmt.Errorf("at most %d instances", p.MaxInstances)
	}
	for _, u := range units(p.Engines) {
		if u.count < 0 || u.count > maxUnits {
			return fmt.Errorf("%d %s", u.count, u.counter)
		}
	}
	return nil
}

func validatePlacement(at gpu.Placement) error {
	if at.Start < 0 || at.Start > maxSlices || at.Size < 1 || at.Size > maxSlices || at.Start+at.Size > maxSlices {
		return fmt.Errorf("%d memory slices from %d on", at.Size, at.Start)
	}
	return nil
}
