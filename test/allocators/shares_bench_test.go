package allocators

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// BenchmarkSharesElsewhere measures an allocation of one of eight devices of a node, all of which are
// free, while other nodes' devices have shares. It uses nothing of Tessera. Its time should not grow
// with the shares, and does with k8s.io/dynamic-resource-allocation 0.37: see
// docs/measurements/2026-11-28-scheduler.md.
func BenchmarkSharesElsewhere(b *testing.B) {
	const driver, node = "gpu.example.com", "node"
	slices := countersAndDevices(driver, node, 8)
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "claim", Namespace: "default", UID: "claim"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name:    "gpu",
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}
	features := structured.Features{ConsumableCapacity: true, PartitionableDevices: true}
	for _, shares := range []int{0, 100, 1000, 10000} {
		b.Run(fmt.Sprintf("shares=%d", shares), func(b *testing.B) {
			allocated := structured.AllocatedState{
				AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
				AggregatedCapacity: structured.NewConsumedCapacityCollection(),
			}
			for i := range shares {
				id := structured.MakeDeviceID(driver, fmt.Sprintf("other-%d", i/32), fmt.Sprintf("gpu-%d", i/4%8))
				allocated.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, new(types.UID(fmt.Sprint(i)))))
			}
			expressions := cel.NewCache(10, cel.Features{EnableConsumableCapacity: true})
			for b.Loop() {
				a, err := structured.NewAllocator(b.Context(), features, allocated, oneClass{}, slices, expressions)
				if err != nil {
					b.Fatal(err)
				}
				got, err := a.Allocate(b.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{claim})
				if err != nil || len(got) != 1 {
					b.Fatal(got, err)
				}
			}
		})
	}
}

// oneClass has the class gpu, which takes all devices.
type oneClass struct{}

func (oneClass) List() ([]*resourceapi.DeviceClass, error) {
	return []*resourceapi.DeviceClass{{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}}}, nil
}

func (c oneClass) Get(string) (*resourceapi.DeviceClass, error) {
	all, err := c.List()
	return all[0], err
}

// countersAndDevices returns a node's pool: devices that can be allocated more than once and
// consume a counter each.
func countersAndDevices(driver, node string, count int) []*resourceapi.ResourceSlice {
	pool := resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 2}
	counters := map[string]resourceapi.Counter{}
	var devices []resourceapi.Device
	for i := range count {
		name := fmt.Sprintf("gpu-%d", i)
		counters[name] = resourceapi.Counter{Value: resource.MustParse("1")}
		devices = append(devices, resourceapi.Device{
			Name: name, AllowMultipleAllocations: new(true),
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
				CounterSet: "gpus", Counters: map[string]resourceapi.Counter{name: {Value: resource.MustParse("1")}},
			}},
		})
	}
	return []*resourceapi.ResourceSlice{
		{
			ObjectMeta: metav1.ObjectMeta{Name: "counters"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driver, Pool: pool, NodeName: new(node),
				SharedCounters: []resourceapi.CounterSet{{Name: "gpus", Counters: counters}},
			},
		},
		{
			ObjectMeta: metav1.ObjectMeta{Name: "devices"},
			Spec:       resourceapi.ResourceSliceSpec{Driver: driver, Pool: pool, NodeName: new(node), Devices: devices},
		},
	}
}
