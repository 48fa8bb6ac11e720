package gpu

// Usage is how much of a GPU programs use now. Values that the driver doesn't report are nil.
type Usage struct {
	// Memory of the whole GPU; zero if the GPU has no memory of its own.
	Memory MemoryUsage
	// Utilization is the fraction of the driver's last sample period, at most a second,
	// in which any program ran on the multiprocessors. The driver doesn't report it in MIG
	// mode.
	Utilization *float64
	// Processes that use the GPU or its partitions; nil if the driver doesn't report them,
	// empty if there are none.
	Processes []Process
	// Partitions are the MIG devices.
	Partitions []PartitionUsage
}

// MemoryUsage is in bytes. Used is without the memory that the driver reserves.
type MemoryUsage struct {
	Total, Used int64
}

// PartitionUsage says how much of a MIG device is used: of its GPU instance, which compute
// instances share.
type PartitionUsage struct {
	UUID                             UUID
	GPUInstanceID, ComputeInstanceID int
	Memory                           MemoryUsage
	// Utilization is the fraction of the time since the last reading in which any program
	// ran on the instance. Drivers report it from Hopper on.
	Utilization *float64
}

// Process uses a GPU.
type Process struct {
	// PID in the caller's PID namespace. Drivers don't list processes that have none there.
	PID int
	// GPUInstanceID and ComputeInstanceID are those of the process's MIG device; nil
	// without MIG.
	GPUInstanceID, ComputeInstanceID *int
	// MemoryBytes of the GPU that the process has allocated, with its CUDA contexts.
	MemoryBytes *int64
	// Utilization is the fraction of the time asked about in which the process ran on the
	// multiprocessors; nil if the driver doesn't report it for any process of the GPU.
	Utilization *float64
	// MPSClient: it uses the GPU through an MPS server.
	MPSClient bool
}
