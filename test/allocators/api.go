package allocators

import (
	"encoding/json"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/api/resource/v1beta1"
	convert "k8s.io/dynamic-resource-allocation/api/v1beta1"
)

// api is a version of resource.k8s.io.
type api string

const (
	v1alpha3 api = "v1alpha3"
	beta1    api = "v1beta1"
	v1       api = "v1"
)

// The conversions panic where the objects of this package can't be converted.

func (a api) class(c *resourceapi.DeviceClass) any {
	if a == v1 {
		return c
	}
	var out v1beta1.DeviceClass
	must(convert.Convert_v1_DeviceClass_To_v1beta1_DeviceClass(c, &out, nil))
	return out
}

func (a api) slice(s *resourceapi.ResourceSlice) any {
	if a == v1 {
		return s
	}
	var out v1beta1.ResourceSlice
	must(convert.Convert_v1_ResourceSlice_To_v1beta1_ResourceSlice(s.DeepCopy(), &out, nil))
	if a == v1alpha3 {
		return withPlainCapacities(out)
	}
	return out
}

// withPlainCapacities returns the slice in v1alpha3, where a capacity is a quantity.
func withPlainCapacities(s v1beta1.ResourceSlice) any {
	data, err := json.Marshal(s)
	must(err)
	var out map[string]any
	must(json.Unmarshal(data, &out))
	spec, _ := out["spec"].(map[string]any)
	devices, _ := spec["devices"].([]any)
	for _, d := range devices {
		device, _ := d.(map[string]any)
		basic, _ := device["basic"].(map[string]any)
		capacity, _ := basic["capacity"].(map[string]any)
		for name, c := range capacity {
			value, _ := c.(map[string]any)
			capacity[name] = value["value"]
		}
	}
	return out
}

func (a api) results(all []resourceapi.DeviceRequestAllocationResult) any {
	if a == v1 {
		return all
	}
	var out []v1beta1.DeviceRequestAllocationResult
	for _, r := range all {
		var o v1beta1.DeviceRequestAllocationResult
		must(convert.Convert_v1_DeviceRequestAllocationResult_To_v1beta1_DeviceRequestAllocationResult(&r, &o, nil))
		out = append(out, o)
	}
	return out
}

func (a api) claim(c *resourceapi.ResourceClaim) any {
	if a == v1 {
		return c
	}
	var out v1beta1.ResourceClaim
	must(convert.Convert_v1_ResourceClaim_To_v1beta1_ResourceClaim(c.DeepCopy(), &out, nil))
	return out
}

func (a api) allocation(data []byte) (*resourceapi.AllocationResult, error) {
	var out resourceapi.AllocationResult
	if a == v1 {
		return &out, json.Unmarshal(data, &out)
	}
	var old v1beta1.AllocationResult
	if err := json.Unmarshal(data, &old); err != nil {
		return nil, err
	}
	return &out, convert.Convert_v1beta1_AllocationResult_To_v1_AllocationResult(&old, &out, nil)
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
