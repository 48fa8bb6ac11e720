package claims_test

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/tessera-dra/tessera/pkg/control/claims"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestClaimsAreCounted lets claims come, be allocated and go, as the informer does.
func TestClaimsAreCounted(t *testing.T) {
	r := prometheus.NewRegistry()
	handler := claims.Counter(r)
	trimmed := func(c *resourceapi.ResourceClaim) any {
		once, err := claims.Trim(c)
		if err != nil {
			t.Fatal(err)
		}
		twice, err := claims.Trim(once) // informers do that
		if err != nil {
			t.Fatal(err)
		}
		return twice
	}
	wants := func(class string) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{}
		c.Spec.Devices.Requests = []resourceapi.DeviceRequest{
			{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic.example.com"}},
			{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{{DeviceClassName: class}, {DeviceClassName: "gpu.nvidia.com"}}},
		}
		return c
	}
	has := func(driver string, devices ...string) *resourceapi.ResourceClaim {
		c := wants("gpu.nvidia.com")
		c.Status.Allocation = &resourceapi.AllocationResult{}
		for _, d := range devices {
			c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Driver: driver, Pool: "n", Device: d})
		}
		return c
	}
	share, other := trimmed(wants("mps.gpu.nvidia.com")), trimmed(wants("mig.nvidia.com"))
	handler.OnAdd(share, true)
	handler.OnAdd(other, false)
	handler.OnAdd(trimmed(has("nic.example.com", "nic-0")), false)
	handler.OnAdd(trimmed(has(gpu.DriverName, "gpu-11111111", "gpu-22222222-mig-1g10gb-0")), false)
	const before = "claims_waiting type=mig 1\nclaims_waiting type=mps 1\ndevices_allocated type=gpu 1\ndevices_allocated type=mig 1\n"
	if got := controltest.Metrics(t, r); got != before {
		t.Errorf("got:\n%swant:\n%s", got, before)
	}
	allocated := trimmed(has(gpu.DriverName, "gpu-11111111-mps4-0"))
	handler.OnUpdate(share, allocated)
	handler.OnDelete(cache.DeletedFinalStateUnknown{Obj: other})
	const after = "devices_allocated type=gpu 1\ndevices_allocated type=mig 1\ndevices_allocated type=mps 1\n"
	if got := controltest.Metrics(t, r); got != after {
		t.Errorf("after one was allocated and one deleted, got:\n%swant:\n%s", got, after)
	}
	handler.OnDelete(allocated)
	if got, want := controltest.Metrics(t, r), strings.TrimSuffix(after, "devices_allocated type=mps 1\n"); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
}
