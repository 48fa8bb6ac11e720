package gpu

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

// Prepared is a device as a claim was given it.
type Prepared struct {
	Device Device
	// Name of the device, and the id that distinguishes this share if the device
	// can be allocated several times.
	Name    DeviceName
	ShareID string
	// Instance that the device's Base is, if that is a Partition; zero for a
	// whole GPU.
	Instance Instance
	// MPS has the paths and limits of the claim's containers as clients of an MPS
	// daemon; nil without MPS.
	MPS *MPSClient
}
