package gpu

// Device is something a claim can be given. The family is closed: a whole GPU
// today; partitions and shares join it with the code that makes them.
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
