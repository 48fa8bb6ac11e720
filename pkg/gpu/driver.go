package gpu

// DriverName is the DRA driver's name: the name of NVIDIA's driver, so that
// manifests written for it work unchanged. Attributes with bare names are in its
// domain.
const DriverName = "gpu.nvidia.com"

// Capacities of MPS shares that claims can request.
const (
	MemoryCapacity = "memory"
	ThreadCapacity = "threadPercentage"
	ClientCapacity = "clients"
)
