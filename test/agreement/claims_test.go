//go:build agreement

package agreement

import (
	"fmt"
	"math/rand/v2"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// author writes random claims as users do: most of them possible, some never, some only
// while others have gone.
type author struct{ *rand.Rand }

func pick[T any](a author, of ...T) T { return of[a.IntN(len(of))] }

// one reports true once in n times.
func (a author) one(n int) bool { return a.IntN(n) == 0 }

// spec is that of a claim.
func (a author) spec() resourceapi.ResourceClaimSpec {
	var out resourceapi.ResourceClaimSpec
	for i := range pick(a, 1, 1, 1, 1, 1, 2, 2, 3) {
		out.Devices.Requests = append(out.Devices.Requests, a.request(fmt.Sprint("r", i)))
	}
	switch {
	case a.one(6):
		same := resourceapi.FullyQualifiedName(pick(a, gpu.DriverName+"/parentUUID", gpu.DriverName+"/productName", gpu.DriverName+"/nvlinkDomain", "resource.kubernetes.io/pcieRoot"))
		out.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &same}}
	case a.one(12):
		different := resourceapi.FullyQualifiedName(pick(a, gpu.DriverName+"/parentUUID", gpu.DriverName+"/index"))
		out.Devices.Constraints = []resourceapi.DeviceConstraint{{DistinctAttribute: &different}}
	}
	return out
}

func (a author) request(name string) resourceapi.DeviceRequest {
	if a.one(8) {
		return resourceapi.DeviceRequest{Name: name, FirstAvailable: []resourceapi.DeviceSubRequest{a.alternative("first"), a.alternative("second")}}
	}
	e := a.exactly()
	switch {
	case a.one(15):
		e.AllocationMode, e.Count = resourceapi.DeviceAllocationModeAll, 0
	case a.one(25):
		e.AdminAccess = new(true)
	}
	return resourceapi.DeviceRequest{Name: name, Exactly: &e}
}

func (a author) alternative(name string) resourceapi.DeviceSubRequest {
	e := a.exactly()
	return resourceapi.DeviceSubRequest{
		Name: name, DeviceClassName: e.DeviceClassName, Selectors: e.Selectors,
		AllocationMode: e.AllocationMode, Count: e.Count, Tolerations: e.Tolerations, Capacity: e.Capacity,
	}
}

func (a author) exactly() resourceapi.ExactDeviceRequest {
	e := resourceapi.ExactDeviceRequest{AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
	switch n := a.IntN(40); {
	case n < 10:
		a.whole(&e)
	case n < 24:
		e.DeviceClassName, e.Count = "mig.nvidia.com", pick(a, int64(1), 1, 1, 1, 2, 3, 9)
		e.Selectors = where(`device.attributes["gpu.nvidia.com"].?profile.orValue("") == "%s"`,
			pick(a, "1g.10gb", "1g.10gb", "1g.20gb", "2g.20gb", "2g.20gb", "3g.40gb", "3g.40gb", "4g.40gb", "1g.18gb", "3g.71gb", "5g.80gb"))
	case n < 34:
		e.DeviceClassName = "mps.gpu.nvidia.com"
		if !a.one(4) {
			a.capacity(&e, gpu.MemoryCapacity, int64(1+a.IntN(pick(a, 20, 20, 40, 160)))<<30)
		}
	case n < 38:
		e.DeviceClassName, e.Count = "timeslice.gpu.nvidia.com", pick(a, int64(1), 1, 1, 2, 5)
	default:
		a.unusual(&e)
	}
	if a.one(6) {
		e.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	}
	return e
}

func (author) capacity(e *resourceapi.ExactDeviceRequest, name resourceapi.QualifiedName, amount int64) {
	q := *resource.NewQuantity(amount, resource.BinarySI)
	e.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{name: q}}
}

func (a author) whole(e *resourceapi.ExactDeviceRequest) {
	e.DeviceClassName, e.Count = "gpu.nvidia.com", pick(a, int64(1), 1, 1, 2, 4)
	switch a.IntN(6) {
	case 0:
		e.Selectors = where(`device.attributes["gpu.nvidia.com"].productName.startsWith("NVIDIA %s")`, pick(a, "H100", "H100", "A100", "L40S", "B200"))
	case 1:
		e.Selectors = where(`device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("%s")) >= 0`, pick(a, "40Gi", "70Gi", "100Gi", "200Gi"))
	case 2:
		e.Selectors = where(`device.attributes["gpu.nvidia.com"].index %% 2 == %s`, pick(a, "0", "1"))
	}
}

// unusual is a request that is wrong or asks for any kind of device.
func (a author) unusual(e *resourceapi.ExactDeviceRequest) {
	e.DeviceClassName = pick(a, "gpu.nvidia.com", "mig.nvidia.com", "mps.gpu.nvidia.com")
	switch a.IntN(6) {
	case 0:
		e.DeviceClassName = "no-such-class"
	case 1:
		e.Selectors = where(`device.attributes["gpu.nvidia.com"].noSuchAttribute == %s`, "1")
	case 2:
		e.Selectors = where(`device.attributes["gpu.nvidia.com"].architecture == "%s"`, pick(a, "Hopper", "Ada Lovelace", "Ampere", "Volta"))
	case 3:
		a.capacity(e, "shares", 1)
	case 4:
		e.DeviceClassName = "mps.gpu.nvidia.com"
		a.capacity(e, gpu.ThreadCapacity, pick(a, int64(50), 100, 150))
	default:
		e.Count = 2
	}
}

func where(format string, a ...any) []resourceapi.DeviceSelector {
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf(format, a...)}}}
}
