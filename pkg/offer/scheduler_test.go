package offer_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// scheduler allocates offered and published devices to claims with the
// scheduler's own allocator.
type scheduler struct {
	t       *testing.T
	node    gpu.Node
	options options
	// features of the scheduler; they decide which of its allocators is used.
	features structured.Features
	claims   map[string]*resourceapi.ResourceClaim
}

// newScheduler is for a cluster that has everything, with one 80 GiB GPU.
func newScheduler(t *testing.T, plan v1alpha1.Plan) *scheduler {
	t.Helper()
	s := &scheduler{
		t: t, node: node(t, "h100-80gb", 1), claims: make(map[string]*resourceapi.ResourceClaim),
		features: structured.Features{AdminAccess: true, ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true},
		options:  options{Server: offer.Server{Counters: true, Multiple: true, Charged: true}},
	}
	s.node.GPUs[0].MemoryReservedBytes = 616 << 20
	s.plan(plan)
	return s
}

func (s *scheduler) plan(p v1alpha1.Plan) {
	s.options.Plan = p
}

// offered returns the current offer of the first GPU.
func (s *scheduler) offered() offer.GPU { return s.offer()[0] }

// offer returns the current offer.
func (s *scheduler) offer() []offer.GPU {
	o := s.options
	o.Allocated = nil
	for _, claim := range s.claims {
		for _, r := range claim.Status.Allocation.Devices.Results {
			o.Allocated = append(o.Allocated, gpu.DeviceName(r.Device))
		}
	}
	return build(s.node, o)
}

// request is a claim's request: a type, and amounts of capacities.
type request struct {
	kind, profile string
	capacity      map[resourceapi.QualifiedName]string
	// linked: two of them, in one NVLink domain.
	linked bool
}

func (r request) exactly() *resourceapi.ExactDeviceRequest {
	out := &resourceapi.ExactDeviceRequest{DeviceClassName: r.kind, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
	if r.profile != "" {
		out.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf(`device.attributes["gpu.nvidia.com"].?profile.orValue("") == %q`, r.profile),
		}}}
	}
	if r.linked {
		out.Count = 2
	}
	if r.capacity != nil {
		out.Capacity = &resourceapi.CapacityRequirements{Requests: make(map[resourceapi.QualifiedName]resource.Quantity)}
		for name, q := range r.capacity {
			out.Capacity.Requests[name] = resource.MustParse(q)
		}
	}
	return out
}

// The classes that the chart makes.
type classes struct{}

func (classes) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (classes) Get(kind string) (*resourceapi.DeviceClass, error) {
	expression := fmt.Sprintf(`device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == %q`, kind)
	if kind == "mps" {
		expression = `device.driver == 'gpu.nvidia.com' && (device.attributes['gpu.nvidia.com'].type == 'mps' ||
			device.attributes['gpu.nvidia.com'].type == 'gpu' && device.attributes['gpu.nvidia.com'].?memoryEnforcement.orValue('') == 'perProcess')`
	}
	return &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: kind}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: expression,
		}}},
	}}, nil
}

// asks lets a claim ask, and returns what it has of which devices, "" if it has
// to wait.
func (s *scheduler) asks(name string, requests ...request) string {
	s.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", UID: "u"}}
	for i, r := range requests {
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: fmt.Sprintf("r%d", i), Exactly: r.exactly()})
		if r.linked {
			claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints, resourceapi.DeviceConstraint{MatchAttribute: new(resourceapi.FullyQualifiedName("gpu.nvidia.com/nvlinkDomain"))})
		}
	}
	form := publish.NoCounters
	if s.options.Counters {
		form = publish.SplitCounters
	}
	var pool []*resourceapi.ResourceSlice
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: s.node.Name, UID: "1"}
	made := publish.Pool(owner, s.offer(), form)
	for i := range made {
		made[i].Spec.Pool.Generation = 1
		if !s.options.Charged {
			checkApart(s.t, made[i])
			forgetShared(&made[i])
		}
		pool = append(pool, &made[i])
	}
	a, err := structured.NewAllocator(s.t.Context(), s.features, s.allocated(), classes{}, pool, cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}))
	if err != nil {
		s.t.Fatal(err)
	}
	results, err := a.Allocate(s.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.node.Name}}, []*resourceapi.ResourceClaim{claim})
	if err != nil {
		s.t.Fatal(err)
	}
	if len(results) == 0 {
		return ""
	}
	claim.Status.Allocation = &results[0]
	s.claims[name] = claim
	var out []string
	for _, r := range results[0].Devices.Results {
		out = append(out, strings.TrimPrefix(strings.TrimPrefix(r.Device, firstGPU), "-")+consumed(r))
	}
	return strings.Join(out, " ")
}

// forgetShared makes the allocator one of Kubernetes before 1.36.2, which
// doesn't charge counters for devices that are allocated several times.
func forgetShared(s *resourceapi.ResourceSlice) {
	for i, d := range s.Spec.Devices {
		if d.AllowMultipleAllocations != nil {
			s.Spec.Devices[i].ConsumesCounters = nil
		}
	}
}

// checkApart checks that no device published for such an allocator is both
// allocated several times and consumes counters.
func checkApart(t *testing.T, s resourceapi.ResourceSlice) {
	t.Helper()
	for _, d := range s.Spec.Devices {
		if d.AllowMultipleAllocations != nil && d.ConsumesCounters != nil {
			t.Errorf("%s is allocated several times and consumes counters", d.Name)
		}
	}
}

func consumed(r resourceapi.DeviceRequestAllocationResult) string {
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r.ConsumedCapacity)) {
		q := r.ConsumedCapacity[name]
		fmt.Fprintf(&out, " %s=%s", name, q.String())
	}
	return out.String()
}

// allocated returns the state of allocations, as the scheduler gathers it.
func (s *scheduler) allocated() structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range s.claims {
		for _, r := range claim.Status.Allocation.Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			if r.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			if r.ConsumedCapacity != nil {
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
			}
		}
	}
	return state
}

func (s *scheduler) gets(name, want string, requests ...request) {
	s.t.Helper()
	if got := s.asks(name, requests...); got != want {
		s.t.Fatalf("claim %s has %q, want %q; offered: %+v", name, got, want, inShort(s.offered()))
	}
}

func (s *scheduler) waits(name string, requests ...request) {
	s.t.Helper()
	s.gets(name, "", requests...)
}

func (s *scheduler) leaves(names ...string) {
	for _, name := range names {
		delete(s.claims, name)
	}
}

var (
	wholeGPU = request{kind: "gpu"}
	oneShare = request{kind: "mps"}
	oneTurn  = request{kind: "timeslice"}
)

// memory asks for a share of a size, "" for the default one.
func memory(size string, threads ...string) request {
	r := request{kind: "mps", capacity: make(map[resourceapi.QualifiedName]string)}
	if size != "" {
		r.capacity["memory"] = size
	}
	for _, t := range threads {
		r.capacity["threadPercentage"] = t
	}
	return r
}

func equalShares(n int32) v1alpha1.Plan { return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: &n}} }

func bySize(step string, clients int32) v1alpha1.Plan {
	q := resource.MustParse(step)
	return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: &q, MaxClients: &clients}}}
}

func inTurn(n int32) v1alpha1.Plan {
	return v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: n}}
}

func sharedParts(shares int32, profiles ...string) v1alpha1.Plan {
	return v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: profiles, MPS: &v1alpha1.PartitionMPS{Shares: shares}}}
}

func sharedLayout(shares int32, layout ...string) v1alpha1.Plan {
	return v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: layout, MPS: &v1alpha1.PartitionMPS{Shares: shares}}}
}
