package gpu

import (
	"errors"
	"fmt"
	"slices"
)

// Limits are the limits of one MPS client, which is a process. Nothing is
// reserved: each limit is a ceiling.
type Limits struct {
	// ThreadPercentage of the multiprocessors of the GPU or partition, 1 to 100;
	// 0: no limit.
	ThreadPercentage int
	// MemoryMiB of device memory, including CUDA's own; 0: no limit.
	MemoryMiB int64
}

// MPSDirs has the directories by which containers reach an MPS daemon: paths of the
// host.
type MPSDirs struct {
	// PipeDir has the daemon's sockets for clients (CUDA_MPS_PIPE_DIRECTORY).
	PipeDir string
	// ShmDir has to be the container's /dev/shm; empty where the driver's MPS does
	// without.
	ShmDir string
}

// MPSClient has the directories and limits of a container that is a client of an MPS
// daemon.
type MPSClient struct {
	MPSDirs

	// ThreadPercentage as in Limits.
	ThreadPercentage int
	// MemoryMiB of each device that the daemon has, by the daemon's own index; 0:
	// no limit there.
	MemoryMiB []int64
}

// CheckMPS returns an error for GPUs on which MPS can't limit its clients.
func CheckMPS(m Model) error {
	if m.FromVolta() {
		return nil
	}
	return fmt.Errorf("MPS has limits only on GPUs of compute capability 7.0 (Volta) or later, and a %s has %s", m.ProductName, m.CUDAComputeCapability)
}

const mebibyte = 1 << 20

// mpsServerMiB is reserved for the MPS server of a GPU or partition (66 MiB on
// an H200, driver 580) and for the driver's rounding.
const mpsServerMiB = 128

// ShareableMiB is how much memory the MPS shares of d, a Whole or a Partition of
// the GPU, have together: all of it but what the driver and the MPS server keep
// for themselves.
func ShareableMiB(g GPU, d Device) (int64, error) {
	switch d := d.(type) {
	case Whole:
		return shareable(g.MemoryBytes - g.MemoryReservedBytes)
	case Partition:
		if g.MIG != nil {
			i := slices.IndexFunc(g.MIG.Profiles, func(p Profile) bool { return p.Name == d.Profile })
			if i >= 0 {
				return shareable(g.MIG.Profiles[i].MemoryBytes)
			}
		}
		return 0, fmt.Errorf("GPU %s has no MIG profile %s", g.UUID, d.Profile)
	case Share, Replica:
	}
	return 0, fmt.Errorf("a %T can't be divided into MPS shares", d)
}

// errNoMemory says that there is too little memory to share.
var errNoMemory = errors.New("too little memory for MPS shares")

func shareable(bytes int64) (int64, error) {
	mib := bytes/mebibyte - mpsServerMiB
	if mib <= 0 {
		return 0, errNoMemory
	}
	return mib, nil
}

// EqualShare are the limits of one of Count equal shares of the GPU or of a
// partition of it: a Count-th of the memory and of the threads, rounded down.
func EqualShare(g GPU, s Share) (Limits, error) {
	if s.Count < 1 {
		return Limits{}, errors.New("a share that is given several times has no limits of its own: they depend on the claim")
	}
	all, err := ShareableMiB(g, s.Of)
	if err != nil {
		return Limits{}, err
	}
	l := Limits{ThreadPercentage: max(1, 100/s.Count), MemoryMiB: all / int64(s.Count)}
	if l.MemoryMiB == 0 {
		return Limits{}, errNoMemory
	}
	return l, nil
}
