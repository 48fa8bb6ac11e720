package gpu

import "errors"

// DriverName is the DRA driver's name: the name of NVIDIA's driver, so that
// manifests written for it work unchanged. Attributes with bare names are in its
// domain.
const DriverName = "gpu.nvidia.com"

// The names of the driver's CDI specifications, whose file names begin with
// CDIVendor: one that all containers share, and one per claim.
const (
	CDIVendor     = "k8s." + DriverName
	CDICommonKind = CDIVendor + "/driver"
	CDIClaimKind  = CDIVendor + "/claim"
)

// ErrNoDriver is the error of an operation on a GPU while the node has no driver.
var ErrNoDriver = errors.New("the NVIDIA driver isn't there now; it is tried again when it is")

// Capacities of MPS shares that claims can request.
const (
	MemoryCapacity = "memory"
	ThreadCapacity = "threadPercentage"
	ClientCapacity = "clients"
)
