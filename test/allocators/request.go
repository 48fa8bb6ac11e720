package allocators

import (
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Request is the request of a claim.
type Request struct {
	// Kind is the device class: the attribute type of its devices.
	Kind string
	// Profile of a partition; "" for any.
	Profile string
	// Count of devices; 0 is 1.
	Count int64
	// All devices of the class instead of a count.
	All bool
	// Capacity to consume.
	Capacity map[resourceapi.QualifiedName]string
	// Linked: all devices in one NVLink domain.
	Linked bool
	// Or is the alternative if the first request can't be met (prioritized list).
	Or *Request
}

// String returns the request as in the log of a play.
func (r Request) String() string {
	out := r.Kind
	if r.Count > 1 {
		out = fmt.Sprintf("%d %s", r.Count, out)
	}
	if r.All {
		out = "all " + out
	}
	if r.Profile != "" {
		out += " " + r.Profile
	}
	if r.Capacity != nil {
		out += fmt.Sprint(r.Capacity)
	}
	if r.Or != nil {
		out += " or " + r.Or.String()
	}
	return out
}

// newClaim returns a claim for all of the requests.
func newClaim(name string, requests ...Request) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: "u"}}
	spec := &claim.Spec.Devices
	for i, r := range requests {
		out := resourceapi.DeviceRequest{Name: fmt.Sprintf("r%d", i)}
		if r.Or != nil {
			out.FirstAvailable = []resourceapi.DeviceSubRequest{subRequest("first", r.exactly()), subRequest("second", r.Or.exactly())}
		} else {
			out.Exactly = r.exactly()
		}
		spec.Requests = append(spec.Requests, out)
		if r.Linked {
			spec.Constraints = append(spec.Constraints, resourceapi.DeviceConstraint{
				Requests: []string{out.Name}, MatchAttribute: new(resourceapi.FullyQualifiedName("gpu.nvidia.com/nvlinkDomain")),
			})
		}
	}
	return claim
}

func (r Request) exactly() *resourceapi.ExactDeviceRequest {
	out := &resourceapi.ExactDeviceRequest{
		DeviceClassName: r.Kind, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: max(1, r.Count),
	}
	if r.All {
		out.AllocationMode, out.Count = resourceapi.DeviceAllocationModeAll, 0
	}
	if r.Profile != "" {
		out.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf(`device.attributes["gpu.nvidia.com"].?profile.orValue("") == %q`, r.Profile),
		}}}
	}
	if r.Capacity != nil {
		out.Capacity = &resourceapi.CapacityRequirements{Requests: make(map[resourceapi.QualifiedName]resource.Quantity)}
		for name, q := range r.Capacity {
			out.Capacity.Requests[name] = resource.MustParse(q)
		}
	}
	return out
}

func subRequest(name string, r *resourceapi.ExactDeviceRequest) resourceapi.DeviceSubRequest {
	return resourceapi.DeviceSubRequest{
		Name: name, DeviceClassName: r.DeviceClassName, Selectors: r.Selectors, AllocationMode: r.AllocationMode, Count: r.Count, Capacity: r.Capacity,
	}
}

// classes are those that the chart makes, by the attribute type of their devices.
func classes() []*resourceapi.DeviceClass {
	var out []*resourceapi.DeviceClass
	for _, kind := range []string{"gpu", "mig", "mps", "timeslice"} {
		expression := fmt.Sprintf(`device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == %q`, kind)
		if kind == "mps" {
			expression = `device.driver == 'gpu.nvidia.com' && (device.attributes['gpu.nvidia.com'].type == 'mps' ||
				device.attributes['gpu.nvidia.com'].type == 'gpu' && device.attributes['gpu.nvidia.com'].?memoryEnforcement.orValue('') == 'perProcess')`
		}
		out = append(out, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: kind}, Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}},
		}})
	}
	return out
}

// join describes several requests.
func join(requests []Request) string {
	var out []string
	for _, r := range requests {
		out = append(out, r.String())
	}
	return strings.Join(out, " and ")
}
