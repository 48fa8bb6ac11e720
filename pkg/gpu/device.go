package gpu

// Device is something a claim can be given. The family is closed: a whole GPU,
// or a MIG partition of one; shares join it with the code that makes them.
//
//sumtype:decl
type Device interface {
	// Parent is the GPU the device is, or is part of.
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

// Conflict says whether two devices need the same silicon, so that no two
// claims may have them at once. A device is in conflict with itself.
func Conflict(a, b Device) bool {
	if a.Parent() != b.Parent() {
		return false
	}
	p, isPartition := a.(Partition)
	q, too := b.(Partition)
	return !isPartition || !too || p.Placement.Overlaps(q.Placement)
}

// Given is a device as a claim was given it.
type Given struct {
	Device Device
	// Instance that a Partition is; zero for a whole GPU.
	Instance Instance
}
