package gpu

import (
	"errors"
	"fmt"
	"slices"
)

// Device is something that can be allocated to a claim. The family is closed: a
// whole GPU, a MIG partition of one, an MPS share of either, or a time-sliced
// replica of a GPU. Devices can be compared with ==.
//
//sumtype:decl
type Device interface {
	// Parent returns the GPU that the device is, or is part of.
	Parent() UUID
	device()
}

// Whole is an entire GPU.
type Whole struct {
	GPU UUID
}

// Parent returns the GPU itself.
func (w Whole) Parent() UUID { return w.GPU }

func (Whole) device() {}

// Partition is a MIG partition: a GPU instance at a place, with the one compute
// instance that takes all of it. It needn't exist yet.
type Partition struct {
	GPU UUID
	// Profile by its name, e.g. "1g.18gb+me".
	Profile   string
	Placement Placement
}

// Parent returns the GPU that the partition is cut from.
func (p Partition) Parent() UUID { return p.GPU }

func (Partition) device() {}

// Share is one of several MPS shares of a GPU or a partition: its programs run
// at the same time as the others', within limits of memory and threads.
type Share struct {
	// Of is a Whole or a Partition. All shares of it are clients of one MPS
	// daemon.
	Of Device
	// Count is the number of equal shares; 0 if each claim gets the amount it
	// requested (a device with multiple allocations).
	Count int
	// Number of this one, from 0; always 0 where Count is.
	Number int
}

// Parent returns the GPU that the share is of.
func (s Share) Parent() UUID { return s.Of.Parent() }

func (Share) device() {}

// Replica is one of several allocations of an entire GPU at the same time:
// their processes take turns. Only time is divided.
type Replica struct {
	GPU UUID
	// Count is the number of replicas.
	Count int
	// Number of this one, from 0.
	Number int
}

// Parent returns the GPU itself.
func (r Replica) Parent() UUID { return r.GPU }

func (Replica) device() {}

// Base is the silicon that a device is, or shares with others: a Whole or a
// Partition.
func Base(d Device) Device {
	switch d := d.(type) {
	case Whole, Partition:
		return d
	case Share:
		return d.Of
	case Replica:
		return Whole{GPU: d.GPU}
	default:
		return d
	}
}

// Conflict reports whether two devices can't be allocated to two claims at
// once: they need the same silicon, and aren't shares, or replicas, that share
// it on purpose. A device conflicts with itself, except a share that can be
// allocated several times.
func Conflict(a, b Device) bool {
	if a.Parent() != b.Parent() || together(a, b) {
		return false
	}
	p, isPartition := Base(a).(Partition)
	q, too := Base(b).(Partition)
	return !isPartition || !too || p.Placement.Overlaps(q.Placement)
}

// together reports whether two devices of one GPU share it on purpose.
func together(a, b Device) bool {
	switch a := a.(type) {
	case Share:
		b, ok := b.(Share)
		return ok && a.Of == b.Of && a.Count == b.Count && (a.Count == 0 || a.Number != b.Number)
	case Replica:
		b, ok := b.(Replica)
		return ok && a.Count == b.Count && a.Number != b.Number
	case Whole, Partition:
	}
	return false
}

// NeedsSilicon reports whether d can't be used while the hardware refuses what another device
// needs: some of its silicon, or, if that is a share, its MPS daemon, which only shares need.
func NeedsSilicon(d, of Device) bool {
	if failed, ok := of.(Share); ok {
		share, ok := d.(Share)
		return ok && share.Of == failed.Of
	}
	return Conflict(d, Base(of))
}

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
		if g.MemoryBytes == 0 {
			return 0, errUnknownMemory
		}
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

// errUnknownMemory says that shares of a GPU's memory can't be computed.
var errUnknownMemory = errors.New("NVML doesn't say how much memory the GPU has")

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
		return Limits{}, errors.New("a share that is allocated several times has no limits of its own: they depend on the claim")
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
