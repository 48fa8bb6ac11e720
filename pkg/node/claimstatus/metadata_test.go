package claimstatus

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// texts returns attributes as texts, so that tables are readable.
func texts(attributes map[string]resourceapi.DeviceAttribute) map[string]string {
	all := map[string]string{}
	for name, a := range attributes {
		switch {
		case a.StringValue != nil:
			all[name] = *a.StringValue
		case a.VersionValue != nil:
			all[name] = "v" + *a.VersionValue
		case a.IntValue != nil:
			all[name] = fmt.Sprint(*a.IntValue)
		case a.BoolValue != nil:
			all[name] = fmt.Sprint(*a.BoolValue)
		}
	}
	return all
}

// TestMetadata checks what a container can read about each kind of device.
func TestMetadata(t *testing.T) {
	node := gpu.Node{DriverVersion: "580.159.04", CUDADriverVersion: "13.0", GPUs: []gpu.GPU{{
		UUID: parent, PCI: "0000:17:00.0", PCIeRoot: "pci0000:16", NUMANode: new(1),
		Model: gpu.Model{ProductName: "NVIDIA H200", Brand: "Nvidia", Architecture: "Hopper", CUDAComputeCapability: "9.0"},
	}}}
	of := map[string]string{
		"driverVersion": "v580.159.4", "cudaDriverVersion": "v13.0.0", "productName": "NVIDIA H200", "brand": "Nvidia",
		"architecture": "Hopper", "cudaComputeCapability": "v9.0.0", "resource.kubernetes.io/pciBusID": "0000:17:00.0",
		"resource.kubernetes.io/pcieRoot": "pci0000:16", "resource.kubernetes.io/numaNode": "1",
	}
	whole, mig := gpu.Whole{GPU: parent}, "MIG-4ca0a4a9-9d0a-5a4e-8e4f-7b3cd8a2f3a1"
	with := func(d gpu.Device, change func(*holding.Holding)) holding.Holding {
		h := holding.New(device, d)
		change(&h)
		return h
	}
	for name, c := range map[string]struct {
		h    holding.Holding
		want map[string]string
	}{
		"whole": {holding.New("g", whole), map[string]string{
			"type": "gpu", "uuid": string(parent), "memoryEnforcement": "hardware", "computeEnforcement": "hardware",
		}},
		"whole for an administrator": {with(whole, func(h *holding.Holding) { h.Admin = true }), map[string]string{
			"type": "gpu", "uuid": string(parent), "memoryEnforcement": "hardware", "computeEnforcement": "hardware", "adminAccess": "true",
		}},
		"partition": {holding.New(device, part), map[string]string{
			"type": "mig", "uuid": mig, "parentUUID": string(parent), "profile": "1g.18gb", "placement": "4:1",
			"gpuInstanceID": "9", "computeInstanceID": "0", "memoryEnforcement": "hardware", "computeEnforcement": "hardware",
		}},
		"equal share": {with(gpu.Share{Of: whole, Count: 4, Number: 2}, func(h *holding.Holding) {
			h.MPS = &holding.MPS{ThreadPercentage: 25, MemoryMiB: 35756}
		}), map[string]string{
			"type": "mps", "uuid": string(parent), "parentUUID": string(parent), "share": "2", "shares": "4",
			"memoryLimitMiB": "35756", "threadPercentage": "25", "memoryEnforcement": "perProcess", "computeEnforcement": "ceiling",
		}},
		"share of a partition": {with(gpu.Share{Of: part}, func(h *holding.Holding) {
			h.ShareID, h.MPS = "s1", &holding.MPS{MemoryMiB: 1024}
		}), map[string]string{
			"type": "mps", "uuid": mig, "parentUUID": string(parent), "profile": "1g.18gb", "placement": "4:1",
			"gpuInstanceID": "9", "computeInstanceID": "0", "shareID": "s1",
			"memoryLimitMiB": "1024", "memoryEnforcement": "perProcess", "computeEnforcement": "ceiling",
		}},
		"replica": {holding.New("r", gpu.Replica{GPU: parent, Count: 8, Number: 7}), map[string]string{
			"type": "timeslice", "uuid": string(parent), "parentUUID": string(parent), "replica": "7", "replicas": "8",
			"memoryEnforcement": "none", "computeEnforcement": "none",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			made := record(c.h)
			made.Instances[part] = gpu.Instance{UUID: gpu.UUID(mig), GPUInstanceID: 9}
			maps.Copy(c.want, of)
			if diff := cmp.Diff(c.want, texts(Metadata(node, &made, c.h).Attributes)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestMetadataWithoutFacts: a GPU that was lost since is still named.
func TestMetadataWithoutFacts(t *testing.T) {
	made := record(holding.New("g", gpu.Whole{GPU: parent}))
	got := texts(Metadata(gpu.Node{}, &made, made.Holdings[0]).Attributes)
	if got["uuid"] != string(parent) || strings.Contains(fmt.Sprint(got), "driverVersion") {
		t.Errorf("got %v", got)
	}
}
