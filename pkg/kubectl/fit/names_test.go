package fit_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
)

// described returns a node with two devices, one with a capacity of which a request may have
// a part only.
func described() fit.Objects {
	s := slice("node-0", "gpu-0", "gpu-1")
	for i := range s.Spec.Devices {
		s.Spec.Devices[i].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"profile": {StringValue: new("3g.40gb")}, "index": {IntValue: new(int64(i))}, "resource.kubernetes.io/pcieRoot": {StringValue: new("pci0000:01")},
		}
	}
	part := &s.Spec.Devices[1]
	part.Attributes["sharing"] = resourceapi.DeviceAttribute{StringValue: new("mps")}
	part.AllowMultipleAllocations = new(true)
	q := func(s string) *resource.Quantity { return new(resource.MustParse(s)) }
	part.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		"memory": {Value: *q("80Gi")},
		"threadPercentage": {Value: *q("1600"), RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: q("100"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: q("1"), Max: q("100"), Step: q("1")},
		}},
	}
	return fit.Objects{Nodes: []corev1.Node{node("node-0")}, Slices: []resourceapi.ResourceSlice{s}, Classes: []resourceapi.DeviceClass{anyDevice()}}
}

// capacity asks for amounts of capacities.
func capacity(of map[resourceapi.QualifiedName]string) func(*resourceapi.ExactDeviceRequest) {
	return func(e *resourceapi.ExactDeviceRequest) {
		e.Capacity = &resourceapi.CapacityRequirements{Requests: make(map[resourceapi.QualifiedName]resource.Quantity)}
		for name, q := range of {
			e.Capacity.Requests[name] = resource.MustParse(q)
		}
	}
}

// subRequests asks for one of several numbers of devices.
func subRequests(counts ...int64) *resourceapi.ResourceClaim {
	c := exactly("gpu")
	r := &c.Spec.Devices.Requests[0]
	r.Exactly = nil
	for i, n := range counts {
		r.FirstAvailable = append(r.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: []string{"first", "second"}[i], DeviceClassName: "gpu", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: n,
		})
	}
	return c
}

// TestRequestsThatNothingMeets: a reason names the attribute or capacity that doesn't
// exist, with those that do, the largest amount that one request can have, and the number
// of devices of each alternative.
func TestRequestsThatNothingMeets(t *testing.T) {
	const failed = "The scheduler refuses it on every node: claim ns/new: selector #0 on device gpu.nvidia.com/node-0/gpu-0: " +
		"CEL runtime error: no such key: "
	const noProfile = "none of them has the attribute migProfile; the attributes of gpu.nvidia.com are index, profile and sharing"
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  fit.Reason
	}{
		"attribute that no device has": {exactly("gpu", where(`device.attributes["gpu.nvidia.com"].migProfile == "3g.40gb"`)), fit.Reason{
			Cause: fit.Refused, Text: failed + "migProfile.",
			Change: "Correct the name: of the 2 devices of DeviceClass gpu, " + noProfile + ".",
		}},
		"attribute that some devices lack": {exactly("gpu", where(`device.attributes["gpu.nvidia.com"].sharing == "x"`)), fit.Reason{
			Cause: fit.Refused, Text: failed + "sharing.",
			Change: `Write selectors that are false where an attribute is absent: .?NAME.orValue("") in place of .NAME.`,
		}},
		"domain that no device has": {exactly("gpu", where(`device.attributes["nvidia.com"].profile == "3g.40gb"`)), fit.Reason{
			Cause: fit.Refused, Text: failed + "profile.",
			Change: "Correct the name: of the 2 devices of DeviceClass gpu, none of them has attributes of the domain nvidia.com, " +
				"only of gpu.nvidia.com and resource.kubernetes.io.",
		}},
		"attribute that no device has, tolerantly": {exactly("gpu", where(`device.attributes["gpu.nvidia.com"].?migProfile.orValue("") == "3g.40gb"`)), fit.Reason{
			Cause: fit.NoMatch,
			Text: `The selector device.attributes["gpu.nvidia.com"].?migProfile.orValue("") == "3g.40gb" of request r ` +
				"is true for none of the 2 devices of DeviceClass gpu: " +
				noProfile + ".",
			Change: "Correct the selector, or add nodes or a SharingPolicy with such devices.",
		}},
		"capacity that no device has": {exactly("gpu", capacity(map[resourceapi.QualifiedName]string{"shares": "1", "memory": "1Gi"})), fit.Reason{
			Cause: fit.NoMatch, Text: "Request r asks for the capacity shares, which none of the 2 devices that match has; " +
				"their capacities are memory and threadPercentage.",
			Change: "Correct the names in the request's capacity, or leave them out.",
		}},
		"more than one request can have": {exactly("gpu", capacity(map[resourceapi.QualifiedName]string{"threadPercentage": "150", "memory": "1Gi"})), fit.Reason{
			Cause: fit.NoMatch,
			Text: "Request r asks for 150 of capacity threadPercentage, which none of the 2 devices that match has: " +
				"threadPercentage is absent (1 device), at most 100 for one request (1).",
			Change: "Ask for less.",
		}},
		"alternative of too many": {subRequests(4), fit.Reason{
			Cause: fit.TooMany, Text: "Request r/first asks for 4 devices of one node, and no node has more than 2 that match (node-0).",
			Change: "Ask for at most 2, or divide the work among several pods.",
		}},
		"alternatives of too many": {subRequests(5, 3), fit.Reason{
			Cause: fit.TooMany, Text: "Request r/first asks for 5 devices of one node, and no node has more than 2 that match (node-0). " +
				"Request r/second asks for 3 devices of one node, and no node has more than 2 that match (node-0).",
			Change: "Ask for at most 2, or divide the work among several pods.",
		}},
	} {
		j := fit.NewJudge(described())
		got, err := j.Fits(t.Context(), j.Nodes(), waiting(tc.claim), 1)
		if err != nil || got.Reason == nil {
			t.Errorf("%s: %+v, %v", name, got, err)
			continue
		}
		if r := got.Reason; r.Cause != tc.want.Cause || r.Text != tc.want.Text || r.Change != tc.want.Change {
			t.Errorf("%s:\n got %s: %s\n     %s\nwant %s: %s\n     %s", name, r.Cause, r.Text, r.Change, tc.want.Cause, tc.want.Text, tc.want.Change)
		}
	}
}
