package holding

import (
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
)

// GPURecord has what was made on one GPU for claims: the partitions created on it,
// from before the first effect until after the last is undone. The claims'
// records show which partitions are in use.
type GPURecord struct {
	GPU gpu.UUID `json:"gpu"`
	// BootID of the boot in which it was written. In any other the hardware has
	// forgotten all of it.
	BootID string `json:"bootID"`
	// ModeSwitched says that MIG mode was switched on, or was about to be.
	ModeSwitched bool            `json:"modeSwitched,omitempty"`
	Partitions   []MadePartition `json:"partitions,omitempty"`
}

// Key returns the UUID that names the record.
func (r GPURecord) Key() string { return string(r.GPU) }

// MadePartition is a partition that was made, or was about to be.
type MadePartition struct {
	Partition
	// Made is nil from the intent until the instance's ids are known. When the intent
	// was written, nothing was at that placement.
	Made *MadeInstance `json:"made,omitempty"`
}

// MadeInstance is how the hardware numbers an instance. Ids are used again for
// later instances, and so is the UUID.
type MadeInstance struct {
	GPUInstanceID int `json:"gpuInstanceID"`
	// ComputeInstanceID is gpu.NoComputeInstance where only the GPU instance was
	// made and couldn't be undone.
	ComputeInstanceID int      `json:"computeInstanceID"`
	UUID              gpu.UUID `json:"uuid,omitempty"`
}

// Settings has a GPU's original settings while Tessera has changed them: from before
// the first change until after the last is restored.
type Settings struct {
	GPU gpu.UUID `json:"gpu"`
	// BootID of the boot in which it was written. In any other the driver has
	// forgotten what was set.
	BootID string `json:"bootID"`
	// ComputeModeBefore is the original compute mode, as pkg/nvml spells it; empty if
	// Tessera didn't change it.
	ComputeModeBefore string `json:"computeModeBefore,omitempty"`
	// Closed is set from before Tessera sets PROHIBITED, because the GPU's MPS daemon is
	// down, until after it sets another mode.
	Closed bool `json:"closed,omitempty"`
	// OpenedByOthers is set while another program has reset the mode to DEFAULT although
	// claims need another. Tessera then leaves it, also when MPS servers are replaced.
	OpenedByOthers bool `json:"openedByOthers,omitempty"`
	// TimeSliceBefore is the original interval; empty if Tessera didn't change it.
	TimeSliceBefore string `json:"timeSliceBefore,omitempty"`
}

// Key returns the UUID that names the settings.
func (s Settings) Key() string { return string(s.GPU) }

// Health has the state of a GPU with which something is wrong, or was until an admin
// ended it.
type Health struct {
	GPU   gpu.UUID     `json:"gpu"`
	State health.State `json:"state"`
}

// Key returns the UUID that names the record.
func (h Health) Key() string { return string(h.GPU) }
