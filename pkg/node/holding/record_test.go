package holding_test

import (
	"testing"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// shares has each way to share a device.
func shares(uid string) holding.Record {
	return holding.Record{
		ClaimUID: uid, Namespace: "default", Name: "inference", BootID: "51f9f1a9-3c3c-4a93-8b2c-0a42e7bb1a5e",
		Holdings: []holding.Holding{
			{Device: "gpu-980fb007-mps4-2", GPU: gpu0, Request: "a", Share: &holding.Part{Count: 4, Number: 2}, MPS: &holding.MPS{ThreadPercentage: 25, MemoryMiB: 35756}},
			{
				Device: "gpu-980fb007-mig-3g71gb-0-mps", GPU: gpu0, Request: "b", Partition: holding.Partition{Profile: "3g.71gb", Size: 4},
				Share: &holding.Part{}, MPS: &holding.MPS{MemoryMiB: 1024}, ShareID: "5f0e4a55-9a55-4d3f-8a1b-2c3d4e5f6071",
			},
			{Device: "gpu-11111111-ts4-0", GPU: gpu1, Request: "c", Replica: &holding.Part{Count: 4}},
			{Device: "gpu-11111111", GPU: gpu1, Request: "d", MPS: &holding.MPS{}},
			{Device: "gpu-11111111", GPU: gpu1, Request: "e", TimeSlice: "Long"},
		},
	}
}

func TestRecord(t *testing.T) {
	r := shares("a")
	if got := r.Holdings[0].CDIName(); got != "gpu-980fb007-mps4-2" {
		t.Errorf("got %q", got)
	}
	if got := r.Holdings[1].CDIName(); got != "gpu-980fb007-mig-3g71gb-0-mps-5f0e4a55-9a55-4d3f-8a1b-2c3d4e5f6071" {
		t.Errorf("got %q", got)
	}
	if own := r.OwnDaemon(); len(own) != 1 || own[0].Request != "d" {
		t.Errorf("own daemon of %v", own)
	}
	if !r.Shares() || wholes("a").Shares() {
		t.Error("which record shares")
	}
	if wholes("a").AwaitsKubelet("next") || !r.AwaitsKubelet("next") || r.AwaitsKubelet(r.BootID) {
		t.Error("which record awaits the kubelet")
	}
}
