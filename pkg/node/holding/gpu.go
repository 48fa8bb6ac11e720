package holding

import "github.com/tessera-dra/tessera/pkg/gpu"

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
	// Made is nil from before the instance is made until it is known by its
	// ids. When that was written, nothing was at the partition's place.
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

// Settings are remembered of one GPU while settings of it that reach beyond one
// claim are not as they were found: from before the first is changed until after
// the last is put back.
type Settings struct {
	GPU gpu.UUID `json:"gpu"`
	// BootID of the boot in which it was written. In any other the driver has
	// forgotten what was set.
	BootID string `json:"bootID"`
	// ComputeModeBefore is the compute mode that was found, as pkg/nvml spells it;
	// empty where this driver didn't change it.
	ComputeModeBefore string `json:"computeModeBefore,omitempty"`
	// Closed says that this driver has set, or was about to set, the compute mode
	// that lets no process use the GPU, because an MPS daemon of it was away: from
	// before that until after the mode is another one.
	Closed bool `json:"closed,omitempty"`
	// OpenedByOthers is set while somebody else has set the compute mode back to the
	// default, although claims need another: it stays, also when MPS servers are
	// replaced.
	OpenedByOthers bool `json:"openedByOthers,omitempty"`
	// TimeSliceBefore is the interval that was found; empty where this driver didn't
	// change it.
	TimeSliceBefore string `json:"timeSliceBefore,omitempty"`
}

// Key returns the UUID that names the settings.
func (s Settings) Key() string { return string(s.GPU) }
