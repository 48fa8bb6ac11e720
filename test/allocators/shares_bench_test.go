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

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// BenchmarkSharesElsewhere measures an allocation of one of eight devices of a node, all of which are
// free, while other nodes' devices have shares. It uses nothing of Tessera. Its time should not grow
// with the shares, and does with k8s.io/dynamic-resource-allocation 0.37: see
// docs/measurements/2026-11-28-scheduler.md.
func BenchmarkSharesElsewhere(b *testing.B) {
	const driver, node = "gpu.example.com", "node"
	for _, l := range []struct {
		name   string
		slices []*resourceapi.ResourceSlice
	}{
		{"one pool", countersAndDevices(driver, node, 0, 8)},
		{"a pool a device", poolPerDevice(driver, node, 8)},
		{"no counters", withoutCounters(countersAndDevices(driver, node, 0, 8))},
	} {
		for _, shares := range []int{0, 100, 1000, 10000} {
			b.Run(fmt.Sprintf("%s/shares=%d", l.name, shares), func(b *testing.B) {
				allocated := structured.AllocatedState{
					AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
					AggregatedCapacity: structured.NewConsumedCapacityCollection(),
				}
				for i := range shares {
					id := structured.MakeDeviceID(driver, fmt.Sprintf("other-%d", i/32), fmt.Sprintf("gpu-%d", i/4%8))
					allocated.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, new(types.UID(fmt.Sprint(i)))))
				}
				allocateOne(b, node, l.slices, allocated)
			})
		}
	}
}

// allocateOne measures an allocation of one device, of those of one node.
func allocateOne(b *testing.B, node string, slices []*resourceapi.ResourceSlice, allocated structured.AllocatedState) {
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "claim", Namespace: "default", UID: "claim"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name:    "gpu",
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}
	features := structured.Features{ConsumableCapacity: true, PartitionableDevices: true}
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
}

// BenchmarkShareKinds is BenchmarkNodes with claims for a quarter of a GPU, on nodes
// whose GPUs are offered in shares by size or in four equal ones, while claims have such shares
// of other nodes' GPUs.
func BenchmarkShareKinds(b *testing.B) {
	four := int32(4)
	for _, kind := range []struct {
		name    string
		plan    v1alpha1.Plan
		request Request
		share   func(n int) resourceapi.DeviceRequestAllocationResult
	}{
		{"by size", bySize("1Gi", 4), Request{Kind: "mps", Capacity: capacity("20Gi")}, func(n int) resourceapi.DeviceRequestAllocationResult {
			return resourceapi.DeviceRequestAllocationResult{
				Device: fmt.Sprintf("gpu-%d", n/4), ShareID: new(types.UID(fmt.Sprint(n))),
				ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{gpu.MemoryCapacity: resource.MustParse("20Gi")},
			}
		}},
		{"equal", v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: &four}}, Request{Kind: "mps"}, func(n int) resourceapi.DeviceRequestAllocationResult {
			return resourceapi.DeviceRequestAllocationResult{Device: fmt.Sprintf("gpu-%d-mps-%d", n/4, n%4)}
		}},
	} {
		for _, elsewhere := range []int{0, 100, 1000, 10000} {
			b.Run(fmt.Sprintf("%s/elsewhere=%d", kind.name, elsewhere), func(b *testing.B) {
				var pools []*resourceapi.ResourceSlice
				for i := range layoutNodes {
					c := host(b, fmt.Sprintf("node-%02d", i))
					c.Server.Multiple, c.Server.Charged = true, true
					c.Plans = offertest.OnePlan(c.Node, kind.plan)
					c.Publish()
					pools = append(pools, c.Slices()...)
				}
				var used []resourceapi.DeviceRequestAllocationResult
				for n := range elsewhere {
					r := kind.share(n)
					r.Driver, r.Pool = gpu.DriverName, fmt.Sprintf("other-%d", n/32)
					used = append(used, r)
				}
				tryNodes(b, layoutNodes, pools, used, kind.request, true)
			})
		}
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

// countersAndDevices returns a pool of a node: devices that can be allocated more than once and
// consume a counter each.
func countersAndDevices(driver, node string, first, count int) []*resourceapi.ResourceSlice {
	pool := resourceapi.ResourcePool{Name: fmt.Sprintf("%s-%d", node, first), Generation: 1, ResourceSliceCount: 2}
	counters := map[string]resourceapi.Counter{}
	var devices []resourceapi.Device
	for i := first; i < first+count; i++ {
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
			ObjectMeta: metav1.ObjectMeta{Name: pool.Name + "-counters"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driver, Pool: pool, NodeName: new(node),
				SharedCounters: []resourceapi.CounterSet{{Name: "gpus", Counters: counters}},
			},
		},
		{
			ObjectMeta: metav1.ObjectMeta{Name: pool.Name + "-devices"},
			Spec:       resourceapi.ResourceSliceSpec{Driver: driver, Pool: pool, NodeName: new(node), Devices: devices},
		},
	}
}

// poolPerDevice returns the devices of countersAndDevices in a pool each.
func poolPerDevice(driver, node string, count int) []*resourceapi.ResourceSlice {
	var out []*resourceapi.ResourceSlice
	for i := range count {
		out = append(out, countersAndDevices(driver, node, i, 1)...)
	}
	return out
}

// withoutCounters returns the last slice of such a pool as all of it, without counters.
func withoutCounters(pool []*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
	devices := pool[len(pool)-1]
	devices.Spec.Pool.ResourceSliceCount = 1
	for i := range devices.Spec.Devices {
		devices.Spec.Devices[i].ConsumesCounters = nil
	}
	return []*resourceapi.ResourceSlice{devices}
}
