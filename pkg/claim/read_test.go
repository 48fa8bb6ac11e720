package claim_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/claim"
)

const (
	driver = "gpu.nvidia.com"
	pool   = "node-a"
)

func result(request, device string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: pool, Device: device}
}

func with(r resourceapi.DeviceRequestAllocationResult, change func(*resourceapi.DeviceRequestAllocationResult)) resourceapi.DeviceRequestAllocationResult {
	change(&r)
	return r
}

func allocated(results []resourceapi.DeviceRequestAllocationResult, configs ...resourceapi.DeviceAllocationConfiguration) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: results, Config: configs},
	}}}
}

func config(source resourceapi.AllocationConfigSource, forDriver, parameters string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: forDriver, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
		}},
	}
}

const partition = "gpu-0-mig-1g10gb-4"

const (
	fromClass = resourceapi.AllocationConfigSourceClass
	fromClaim = resourceapi.AllocationConfigSourceClaim

	plain      = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`
	timeSliced = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`
	mps        = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`
	mig        = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS"}}`
	plainMIG   = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig"}`
	slicedMIG  = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"TimeSlicing"}}`
	vfio       = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig","iommu":{"backendPolicy":"LegacyOnly"}}`
	misspelt   = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharign":{}}`

	misspeltStrategy = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"mps"}}`
)

func TestRead(t *testing.T) {
	foreign := resourceapi.DeviceRequestAllocationResult{Request: "nic", Driver: "nic.example.com", Pool: pool, Device: "eth0"}
	for name, tc := range map[string]struct {
		results []resourceapi.DeviceRequestAllocationResult
		configs []resourceapi.DeviceAllocationConfiguration
		want    []claim.Grant
	}{
		"one": {
			results: []resourceapi.DeviceRequestAllocationResult{result("gpu", "gpu-980fb007")},
			want:    []claim.Grant{{Request: "gpu", Device: "gpu-980fb007"}},
		},
		"several requests, one with allocationMode All": {
			results: []resourceapi.DeviceRequestAllocationResult{result("one", "gpu-0"), result("all", "gpu-1"), result("all", "gpu-2")},
			want:    []claim.Grant{{Request: "one", Device: "gpu-0"}, {Request: "all", Device: "gpu-1"}, {Request: "all", Device: "gpu-2"}},
		},
		"firstAvailable": {
			results: []resourceapi.DeviceRequestAllocationResult{result("gpu/cheap", "gpu-0")},
			want:    []claim.Grant{{Request: "gpu/cheap", Device: "gpu-0"}},
		},
		"admin access, also to a device of the same claim": {
			results: []resourceapi.DeviceRequestAllocationResult{
				result("gpu", "gpu-0"),
				with(result("look", "gpu-0"), func(r *resourceapi.DeviceRequestAllocationResult) { r.AdminAccess = new(true) }),
			},
			want: []claim.Grant{{Request: "gpu", Device: "gpu-0"}, {Request: "look", Device: "gpu-0", Admin: true}},
		},
		"shares of one device": {
			results: []resourceapi.DeviceRequestAllocationResult{
				with(result("a", "gpu-0"), func(r *resourceapi.DeviceRequestAllocationResult) { r.ShareID = new(types.UID("s1")) }),
				with(result("b", "gpu-0"), func(r *resourceapi.DeviceRequestAllocationResult) { r.ShareID = new(types.UID("s2")) }),
			},
			want: []claim.Grant{{Request: "a", Device: "gpu-0", ShareID: "s1"}, {Request: "b", Device: "gpu-0", ShareID: "s2"}},
		},
		"other drivers and pools are left out": {
			results: []resourceapi.DeviceRequestAllocationResult{
				foreign, result("gpu", "gpu-0"),
				with(result("far", "gpu-9"), func(r *resourceapi.DeviceRequestAllocationResult) { r.Pool = "node-b" }),
			},
			configs: []resourceapi.DeviceAllocationConfiguration{config(fromClaim, "nic.example.com", `{"mtu":9000}`)},
			want:    []claim.Grant{{Request: "gpu", Device: "gpu-0"}},
		},
		"the claim's configuration wins over the class's, wherever it stands": {
			results: []resourceapi.DeviceRequestAllocationResult{result("gpu", "gpu-0")},
			configs: []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, plain), config(fromClass, driver, timeSliced)},
			want:    []claim.Grant{{Request: "gpu", Device: "gpu-0"}},
		},
		"of two configurations the later one wins": {
			results: []resourceapi.DeviceRequestAllocationResult{result("gpu", "gpu-0")},
			configs: []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, mps), config(fromClaim, driver, plain)},
			want:    []claim.Grant{{Request: "gpu", Device: "gpu-0"}},
		},
		"a configuration for another request": {
			results: []resourceapi.DeviceRequestAllocationResult{result("gpu/cheap", "gpu-0")},
			configs: []resourceapi.DeviceAllocationConfiguration{
				config(fromClaim, driver, misspelt, "other"), config(fromClaim, driver, misspelt, "gpu/dear"),
			},
			want: []claim.Grant{{Request: "gpu/cheap", Device: "gpu-0"}},
		},
		"a configuration for MIG devices that names no request": {
			results: []resourceapi.DeviceRequestAllocationResult{result("gpu", "gpu-0")},
			configs: []resourceapi.DeviceAllocationConfiguration{config(fromClass, driver, mig)},
			want:    []claim.Grant{{Request: "gpu", Device: "gpu-0"}},
		},
		"a configuration for whole GPUs that names no request": {
			results: []resourceapi.DeviceRequestAllocationResult{result("part", partition)},
			configs: []resourceapi.DeviceAllocationConfiguration{config(fromClass, driver, timeSliced), config(fromClaim, driver, mps)},
			want:    []claim.Grant{{Request: "part", Device: partition}},
		},
		"values of a configuration of another kind aren't looked at": {
			results: []resourceapi.DeviceRequestAllocationResult{result("part", partition)},
			configs: []resourceapi.DeviceAllocationConfiguration{config(fromClaim, driver, misspeltStrategy), config(fromClaim, driver, vfio)},
			want:    []claim.Grant{{Request: "part", Device: partition}},
		},
		"neither are those of one that doesn't count": {
			results: []resourceapi.DeviceRequestAllocationResult{result("gpu", "gpu-0")},
			configs: []resourceapi.DeviceAllocationConfiguration{
				config(fromClass, driver, misspeltStrategy), config(fromClaim, driver, mig, "gpu"), config(fromClaim, driver, plain),
			},
			want: []claim.Grant{{Request: "gpu", Device: "gpu-0"}},
		},
		"each kind of device with a configuration of its own": {
			results: []resourceapi.DeviceRequestAllocationResult{result("gpu", "gpu-0"), result("part", partition)},
			configs: []resourceapi.DeviceAllocationConfiguration{
				config(fromClaim, driver, mig), config(fromClaim, driver, plainMIG, "part"), config(fromClaim, driver, plain, "gpu"),
			},
			want: []claim.Grant{{Request: "gpu", Device: "gpu-0"}, {Request: "part", Device: partition}},
		},
		"partitions of one GPU": {
			results: []resourceapi.DeviceRequestAllocationResult{result("parts", partition), result("parts", "gpu-0-mig-1g10gb-5")},
			want:    []claim.Grant{{Request: "parts", Device: partition}, {Request: "parts", Device: "gpu-0-mig-1g10gb-5"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := claim.Read(allocated(tc.results, tc.configs...), driver, pool)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestReadRefuses(t *testing.T) {
	one := []resourceapi.DeviceRequestAllocationResult{result("gpu/cheap", "gpu-0")}
	part := []resourceapi.DeviceRequestAllocationResult{result("part", partition)}
	for name, tc := range map[string]struct {
		claim     *resourceapi.ResourceClaim
		permanent bool
		says      []string
	}{
		"not allocated": {&resourceapi.ResourceClaim{}, false, []string{"not allocated"}},
		"another node's": {
			allocated([]resourceapi.DeviceRequestAllocationResult{with(one[0], func(r *resourceapi.DeviceRequestAllocationResult) { r.Pool = "node-b" })}),
			false, []string{`pool "node-a"`, "gpu.nvidia.com/node-b/gpu-0"},
		},
		"nothing":          {allocated(nil), false, []string{"no devices at all"}},
		"one device twice": {allocated([]resourceapi.DeviceRequestAllocationResult{result("a", "gpu-0"), result("b", "gpu-0")}), true, []string{`"gpu-0"`, `"a"`, `"b"`}},
		"unknown field":    {allocated(one, config(fromClaim, driver, misspelt)), true, []string{`"sharign"`}},
		"unknown field, overridden": {
			allocated(one, config(fromClass, driver, misspelt), config(fromClaim, driver, plain)), true, []string{`"sharign"`, "DeviceClass"},
		},
		"for MIG, addressed to a GPU":        {allocated(one, config(fromClaim, driver, mig, "gpu")), true, []string{"MigDeviceConfig", "GpuConfig"}},
		"for GPUs, addressed to a partition": {allocated(part, config(fromClaim, driver, plain, "part")), true, []string{"GpuConfig", "MigDeviceConfig", partition}},
		"misspelt strategy": {
			allocated(one, config(fromClaim, driver, misspeltStrategy)), true, []string{`GpuConfig: sharing.strategy: Unsupported value: "mps"`, `"TimeSlicing", "MPS"`, "ResourceClaim"},
		},
		"misspelt strategy, addressed to a partition": {
			allocated(part, config(fromClaim, driver, misspeltStrategy, "part")), true, []string{"GpuConfig isn't for device", "MigDeviceConfig"},
		},
		"for passthrough, addressed to a GPU": {allocated(one, config(fromClaim, driver, vfio, "gpu")), true, []string{"VfioDeviceConfig isn't for device", "use GpuConfig"}},
		"no parameters":                       {allocated(one, config(fromClaim, driver, "")), true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := claim.Read(tc.claim, driver, pool)
			if err == nil || got != nil {
				t.Fatalf("got %v, %v, want an error", got, err)
			}
			if errors.Is(err, claim.ErrPermanent) != tc.permanent {
				t.Errorf("got %q, permanent should be %v", err, tc.permanent)
			}
			for _, s := range tc.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("got %q, want it to say %q", err, s)
				}
			}
		})
	}
}

// FuzzRead feeds it what an API server might hold: it must neither panic nor
// grant what the allocation doesn't have.
func FuzzRead(f *testing.F) {
	for _, c := range []*resourceapi.ResourceClaim{
		{},
		allocated([]resourceapi.DeviceRequestAllocationResult{result("gpu/cheap", "gpu-0"), result("b", "gpu-1")},
			config(fromClass, driver, plain), config(fromClaim, driver, mps, "gpu"), config(fromClaim, "x", "[]")),
	} {
		data, err := json.Marshal(c.Status)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"allocation":{"devices":{"results":[{"request":"a","driver":"gpu.nvidia.com","pool":"node-a","device":"gpu-0-mps","shareID":"s","consumedCapacity":{"memory":"10Gi","threadPercentage":"25"}}],"config":[{"source":"FromClaim","opaque":{"driver":"gpu.nvidia.com","parameters":` + mpsLimits + `}}]}}}`))
	f.Add([]byte(`{"allocation":{"devices":{"results":[{"request":"a","driver":"gpu.nvidia.com","pool":"node-a","device":"gpu-0"}],"config":[{"source":"FromClaim"}]}}}`))
	f.Fuzz(func(t *testing.T, status []byte) {
		c := &resourceapi.ResourceClaim{}
		if json.Unmarshal(status, &c.Status) != nil {
			return
		}
		grants, err := claim.Read(c, driver, pool)
		if err != nil {
			return
		}
		for _, g := range grants {
			if !slices.ContainsFunc(c.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
				return r.Driver == driver && r.Pool == pool && r.Request == g.Request && r.Device == string(g.Device)
			}) {
				t.Errorf("%v was never allocated", g)
			}
		}
	})
}
