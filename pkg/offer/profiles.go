package offer

import (
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// defaultProfiles are what a plan without profiles offers: all the GPU has.
func defaultProfiles(m gpu.MIG) []gpu.Profile {
	return m.Profiles
}
