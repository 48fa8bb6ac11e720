package offer_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/claimstatus"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// TestContainersReadWhatIsPublished: claimstatus and this package each write the attributes
// of a device, because the node's programs don't import this package. A container reads
// under a name what the ResourceSlice has under it, and what only one of them has is meant
// to be there only. A new attribute that should be in both fails here until it is.
func TestContainersReadWhatIsPublished(t *testing.T) {
	onlyPublished := []string{
		"addressingMode", "eccEnabled", "index", "migCapable", "minor", "nvlinkDomain", "nvlinkLinks",
		"shares", // of a partition; a claim's share of it has no number, and shareID instead
	}
	onlyRead := []string{
		"computeInstanceID", "gpuInstanceID", "memoryLimitMiB", "replica", "share", "threadPercentage",
		"computeEnforcement", "memoryEnforcement", // of partitions
		"placement", // of shares of partitions
		"uuid",      // of parts
	}
	for name, c := range map[string]struct {
		plan v1alpha1.Plan
		want string // the type of devices that there must be
	}{
		"whole":                {v1alpha1.Plan{}, gpu.TypeGPU},
		"partitions":           {v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.10gb", "3g.40gb"}}}, gpu.TypeMIG},
		"shares":               {v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: new(int32(4))}}, gpu.TypeMPS},
		"shares of any size":   {v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: new(resource.MustParse("1Gi")), MaxClients: new(int32(8))}}}, gpu.TypeMPS},
		"shares of partitions": {v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: []string{"3g.40gb"}, MPS: &v1alpha1.PartitionMPS{Shares: 2}}}, gpu.TypeMPS},
		"replicas":             {v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 3}}, gpu.TypeTimeSlice},
	} {
		t.Run(name, func(t *testing.T) {
			node, err := offertest.Host("h100-80gb", 2)
			if err != nil {
				t.Fatal(err)
			}
			names, err := gpu.NewNames(node.GPUs)
			if err != nil {
				t.Fatal(err)
			}
			seen := false
			for _, g := range offer.Build(node, offertest.OnePlan(node, c.plan), nil, offer.Server{Counters: true, Multiple: true, Charged: true}) {
				for _, d := range g.Devices {
					read := readInContainer(t, node, names, gpu.DeviceName(d.Name))
					seen = seen || *d.Attributes["type"].StringValue == c.want
					for attribute, published := range d.Attributes {
						a, both := read[string(attribute)]
						if !both && !slices.Contains(onlyPublished, string(attribute)) {
							t.Errorf("%s: only the ResourceSlice has %s", d.Name, attribute)
						}
						if both && !cmp.Equal(published, a) {
							t.Errorf("%s: %s (-published +read):\n%s", d.Name, attribute, cmp.Diff(published, a))
						}
					}
					for attribute := range read {
						if _, both := d.Attributes[resourceapi.QualifiedName(attribute)]; !both && !slices.Contains(onlyRead, attribute) {
							t.Errorf("%s: only the container has %s", d.Name, attribute)
						}
					}
				}
			}
			if !seen {
				t.Errorf("no device of type %s", c.want)
			}
		})
	}
}

// readInContainer returns the attributes that a container with the device reads.
func readInContainer(t *testing.T, node gpu.Node, names *gpu.Names, name gpu.DeviceName) map[string]resourceapi.DeviceAttribute {
	t.Helper()
	d, err := names.Device(name)
	if err != nil {
		t.Fatal(err)
	}
	h := holding.New(name, d)
	if _, ok := d.(gpu.Share); ok {
		h.MPS = &holding.MPS{MemoryMiB: 1024, ThreadPercentage: 25}
	}
	realized := holding.Realized{Record: holding.Record{Holdings: []holding.Holding{h}}, Instances: map[gpu.Partition]gpu.Instance{}}
	if p, ok := h.Base().(gpu.Partition); ok {
		realized.Instances[p] = gpu.Instance{UUID: "MIG-4ca0a4a9-9d0a-5a4e-8e4f-7b3cd8a2f3a1"}
	}
	return claimstatus.Metadata(node, &realized, h).Attributes
}
