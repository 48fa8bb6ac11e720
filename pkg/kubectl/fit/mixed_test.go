package fit_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/kubectl/fit"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/test/allocators"
)

// nvidiaPartition returns a partition as NVIDIA's driver publishes it: one that it creates on
// demand, or, if made, one that it found, with its UUID and its memory slices.
func nvidiaPartition(made bool) resourceapi.Device {
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	version := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{VersionValue: &s} }
	count := func(s string) resourceapi.DeviceCapacity {
		return resourceapi.DeviceCapacity{Value: resource.MustParse(s)}
	}
	d := resourceapi.Device{
		Name: "gpu-0-mig-1g10gb-19-0",
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"type": text("mig"), "parentUUID": text("GPU-11111111-2222-3333-4444-555555555555"), "profile": text("1g.10gb"),
			"productName": text("NVIDIA H100 80GB HBM3"), "brand": text("Nvidia"), "architecture": text("Hopper"), "addressingMode": text("None"),
			"cudaComputeCapability": version("9.0.0"), "driverVersion": version("580.105.8"), "cudaDriverVersion": version("13.0.0"),
			"resource.kubernetes.io/pciBusID": text("0000:19:00.0"), "resource.kubernetes.io/pcieRoot": text("pci0000:18"),
			"resource.kubernetes.io/numaNode": {IntValue: new(int64(0))},
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"memory": count("9856Mi"), "multiprocessors": count("16"), "copyEngines": count("1"), "decoders": count("1"),
			"encoders": count("0"), "jpegEngines": count("1"), "ofaEngines": count("0"),
		},
	}
	if made {
		d.Attributes["uuid"] = text("MIG-11111111-2222-3333-4444-555555555555")
		d.Capacity["memorySlice0"] = count("1")
	}
	return d
}

// selectors returns an expression for each attribute and capacity that a device has,
// which is an error on a device without it.
func selectors(d resourceapi.Device) map[string]string {
	out := make(map[string]string)
	for name, a := range d.Attributes {
		domain, id, ok := strings.Cut(string(name), "/")
		if !ok {
			domain, id = "gpu.nvidia.com", string(name)
		}
		attribute := fmt.Sprintf("device.attributes[%q].%s", domain, id)
		switch {
		case a.VersionValue != nil:
			out[id] = attribute + `.compareTo(semver("1.0.0")) > 0`
		case a.IntValue != nil:
			out[id] = attribute + " >= 0"
		default:
			out[id] = attribute + `.matches(".")`
		}
	}
	for name := range d.Capacity {
		out[string(name)] = fmt.Sprintf(`device.capacity["gpu.nvidia.com"].%s.compareTo(quantity("0")) >= 0`, name)
	}
	return out
}

// TestSelectorsForPartitionsOfNVIDIAsDriver: a claim that selects partitions by anything
// that NVIDIA's driver publishes of them fits on a node of either driver, also beside
// nodes of the other. An expression that is an error on one device keeps the pod from all
// nodes.
func TestSelectorsForPartitionsOfNVIDIAsDriver(t *testing.T) {
	for name, tc := range map[string]struct {
		made      bool
		instances []gpu.Instance
	}{
		"on demand": {},
		"made by others": {true, []gpu.Instance{{
			GPUInstanceID: 7, ComputeInstanceID: 0, Profile: "1g.10gb", UUID: "MIG-22222222-3333-4444-5555-666666666666", Placement: gpu.Placement{Start: 0, Size: 1},
		}}},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := offertest.Host("h100-80gb", 1)
			if err != nil {
				t.Fatal(err)
			}
			n.Name, n.GPUs[0].MIG.Instances = "tessera", tc.instances
			if tc.made {
				n.GPUs[0].MIG.Enabled, n.GPUs[0].MIG.Pending = true, true
			}
			c := &allocators.Cluster{
				Node: n, Plans: offertest.OnePlan(n, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}), Allocator: allocators.NewLibrary(),
				Server: allocators.Server{Server: offer.Server{Counters: !tc.made}, Form: publish.SplitCounters},
			}
			c.Publish()
			o := objects(c)
			device := nvidiaPartition(tc.made)
			nodeName := "nvidia"
			o.Slices = append(o.Slices, resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: "nvidia"},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: "gpu.nvidia.com", NodeName: &nodeName, Pool: resourceapi.ResourcePool{Name: "nvidia", ResourceSliceCount: 1},
					Devices: []resourceapi.Device{device},
				},
			})
			j := fit.NewJudge(o)
			for attribute, expression := range selectors(device) {
				got, err := j.Fits(t.Context(), j.Nodes(), waiting(exactly("mig", where(expression))), 1)
				if err != nil {
					t.Fatal(err)
				}
				var nodes []string
				for _, r := range got.Nodes {
					nodes = append(nodes, r.Node)
				}
				slices.Sort(nodes)
				if want := []string{"nvidia", "tessera"}; !slices.Equal(nodes, want) {
					t.Errorf("%s: fits on %v, want %v; %+v", attribute, nodes, want, got.Reason)
				}
			}
		})
	}
}
