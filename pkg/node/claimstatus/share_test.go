package claimstatus

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// TestStatusOfShares checks the limits, the GPU, and the share's ID if there is
// one.
func TestStatusOfShares(t *testing.T) {
	inPartition := gpu.Partition{GPU: parent, Profile: "3g.71gb", Placement: gpu.Placement{Size: 4}}
	inShare := func(id string, limits holding.MPS) holding.Holding {
		g := holding.New("gpu-980fb007-mig-3g71gb-0-mps", gpu.Share{Of: inPartition})
		g.ShareID, g.MPS = id, &limits
		return g
	}
	quarter := holding.New("gpu-980fb007-mps4-2", gpu.Share{Of: gpu.Whole{GPU: parent}, Count: 4, Number: 2})
	quarter.MPS = &holding.MPS{ThreadPercentage: 25, MemoryMiB: 35756}
	made := record(quarter, inShare("s1", holding.MPS{MemoryMiB: 1024}), inShare("s9", holding.MPS{}),
		holding.New("gpu-980fb007-ts4-2", gpu.Replica{GPU: parent, Count: 4, Number: 2}))
	made.Instances[inPartition] = gpu.Instance{UUID: "MIG-4ca0a4a9-9d0a-5a4e-8e4f-7b3cd8a2f3a1", GPUInstanceID: 2}
	c := claimed()
	for name, id := range map[string]string{"gpu-980fb007-mps4-2": "", "gpu-980fb007-mig-3g71gb-0-mps": "s1", "gpu-980fb007-ts4-2": ""} {
		r := resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: "gpu.nvidia.com", Pool: "node-a", Device: name}
		if id != "" {
			r.ShareID = new(types.UID(id))
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, r)
	}
	s := &server{version: "v1", claim: c}
	w := start(t, s)
	for range 2 { // the second time, the status is already correct
		w.Enqueue(made)
		idle(t, w)
	}
	const want = `"status":{"devices":[{"driver":"gpu.nvidia.com","pool":"node-a","device":"gpu-980fb007-mig-3g71gb-0-mps","shareID":"s1","data":{` +
		`"uuid":"MIG-4ca0a4a9-9d0a-5a4e-8e4f-7b3cd8a2f3a1","parentUUID":"GPU-980fb007-8a10-0135-bada-13f71feaef21","profile":"3g.71gb",` +
		`"placement":{"start":0,"size":4},"gpuInstanceID":2,"computeInstanceID":0,"mps":{"memoryMiB":[1024]}}},` +
		`{"driver":"gpu.nvidia.com","pool":"node-a","device":"gpu-980fb007-mps4-2","data":{` +
		`"parentUUID":"GPU-980fb007-8a10-0135-bada-13f71feaef21","mps":{"threadPercentage":25,"memoryMiB":[35756]}}}]}}`
	if len(s.written) != 1 || !strings.HasSuffix(s.written[0], want) {
		t.Errorf("got  %v\nwant one that ends in %s", s.written, want)
	}
}
