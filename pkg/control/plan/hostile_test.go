package plan

import (
	"encoding/json"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/policy"
)

// FuzzHostileNode reads any JSON as what a node's plugin reports. Whatever it says,
// its devices are offered in its own pool, and no two have the same name.
func FuzzHostileNode(f *testing.F) {
	f.Add([]byte(`{"driverVersion":"580.159.04","gpus":[{"uuid":"GPU-980fb007-d0f5-47e3-8d7f-b16b8b11bba9","memory":"80Gi"},{"uuid":"GPU-980fb007-d0f5-47e3-8d7f-b16b8b11bbaa","memory":"80Gi","index":1}]}`), uint8(2))
	f.Add([]byte(`{"gpus":[{"uuid":"GPU-1","memory":"80Gi","mig":{"enabled":true,"pending":true,"switchable":true,"profiles":[{"name":"3g.40gb","id":9,"maxInstances":2,"memory":"40Gi","multiprocessors":60,"placements":[{"start":0,"size":4},{"start":4,"size":4}]}],"instances":[{"uuid":"MIG-1","profile":"3g.40gb","placement":{"start":4,"size":4}}]},"conditions":[{"type":"Lost","status":"True"}]}]}`), uint8(0))
	f.Add([]byte(`{"gpus":[{"uuid":"GPU-1","memory":"80Gi","mig":{"profiles":[{"name":"1g.10gb","maxInstances":7,"placements":[{"start":0,"size":1}]}]}}]}`), uint8(1))
	f.Add([]byte(`{"gpus":[{"uuid":"GPU-980fb007-d0f5-47e3-8d7f-b16b8b11bba9","productName":"P","memory":"80Gi","conditions":[{"type":"PrepareFailed","refused":["gpu-980fb007","x","gpu-980fb007-mps-mps"],"retryAt":"2026-11-28T09:00:00Z"},{"type":"Lost","retryAt":"0000-01-01T00:00:00Z"}]}]}`), uint8(2))
	f.Fuzz(func(t *testing.T, status []byte, which uint8) {
		inv := &v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
		if json.Unmarshal(status, &inv.Status) != nil || len(inv.Status.GPUs) > 8 {
			return
		}
		plans := []v1alpha1.Plan{
			{Partitioned: &v1alpha1.PartitionedPlan{}}, {Partitioned: &v1alpha1.PartitionedPlan{Layout: []string{"1g.10gb", "3g.40gb", "1g.10gb"}}},
			{MPS: &v1alpha1.MPSPlan{Shares: new(int32(4))}}, {TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 4}},
		}
		d := decide(inv, Input{
			facts:    facts{able: publish.Abilities{Counters: publish.SplitCounters, Multiple: publish.Yes, Taints: publish.Yes, Charged: true, Version: "v1.37.1"}},
			labels:   labels.Set{},
			policies: []policy.Policy{{Name: "p", Nodes: labels.Everything(), Plan: plans[int(which)%len(plans)]}},
		})
		var names []string
		for _, s := range d.Pool {
			if s.Spec.Driver != gpu.DriverName || s.Spec.Pool.Name != "n" || s.Spec.NodeName == nil || *s.Spec.NodeName != "n" || s.Spec.AllNodes != nil || s.Spec.NodeSelector != nil {
				t.Errorf("a slice of %s, pool %s", s.Spec.Driver, s.Spec.Pool.Name)
			}
			for _, device := range s.Spec.Devices {
				for name, a := range device.Attributes {
					if a.StringValue != nil && len(*a.StringValue) > resourceapi.DeviceAttributeMaxValueLength {
						t.Errorf("%s of %s is %q", name, device.Name, *a.StringValue)
					}
				}
				names = append(names, device.Name)
			}
			if len(s.Spec.Devices) > resourceapi.ResourceSliceMaxDevices {
				t.Errorf("%d devices", len(s.Spec.Devices))
			}
		}
		slices.Sort(names)
		if len(slices.Compact(slices.Clone(names))) != len(names) {
			t.Errorf("devices %v", names)
		}
	})
}
