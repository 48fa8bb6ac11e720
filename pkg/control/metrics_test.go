package control

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// counters returns what a registry has, a line each: "NAME LABEL=VALUE… NUMBER", zeros left out.
func counters(t *testing.T, r prometheus.Gatherer) string {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, f := range families {
		for _, m := range f.GetMetric() {
			n := m.GetGauge().GetValue() + m.GetCounter().GetValue()
			if n == 0 {
				continue
			}
			b.WriteString(strings.TrimPrefix(f.GetName(), "tessera_"))
			for _, l := range m.GetLabel() {
				b.WriteString(" " + l.GetName() + "=" + l.GetValue())
			}
			fmt.Fprintf(&b, " %g\n", n)
		}
	}
	return b.String()
}

// TestClaimsAreCounted lets claims come, be allocated and go, as the informer does.
func TestClaimsAreCounted(t *testing.T) {
	r := prometheus.NewRegistry()
	handler := newMetrics(r).claims()
	trimmed := func(c *resourceapi.ResourceClaim) any {
		once, err := trim(c)
		if err != nil {
			t.Fatal(err)
		}
		twice, err := trim(once) // informers do that
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
	if got := counters(t, r); got != before {
		t.Errorf("got:\n%swant:\n%s", got, before)
	}
	allocated := trimmed(has(gpu.DriverName, "gpu-11111111-mps4-0"))
	handler.OnUpdate(share, allocated)
	handler.OnDelete(cache.DeletedFinalStateUnknown{Obj: other})
	const after = "devices_allocated type=gpu 1\ndevices_allocated type=mig 1\ndevices_allocated type=mps 1\n"
	if got := counters(t, r); got != after {
		t.Errorf("after one was allocated and one deleted, got:\n%swant:\n%s", got, after)
	}
	handler.OnDelete(allocated)
	if got, want := counters(t, r), strings.TrimSuffix(after, "devices_allocated type=mps 1\n"); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
}

// TestOffersAreCounted reports a node with two GPUs, and takes it away again.
func TestOffersAreCounted(t *testing.T) {
	r := prometheus.NewRegistry()
	s := newFixture(t)
	m := newMetrics(r)
	s.nodes.planner.metrics = m
	s.nodes.slices = countedSlices{s.store, m.writes}
	s.published()
	const want = "devices_offered policy= type=gpu 2\nslice_writes_total reason=first 1\n"
	if got := counters(t, r); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	problems, err := testutil.GatherAndLint(r)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	s.nodes.forgetNode("n")
	if got, want := counters(t, r), "slice_writes_total reason=first 1\n"; got != want {
		t.Errorf("without the node, got:\n%swant:\n%s", got, want)
	}
}

// TestOffersOfPolicies replaces a policy by another, and deletes it.
func TestOffersOfPolicies(t *testing.T) {
	r := prometheus.NewRegistry()
	m := newMetrics(r)
	offer := func(policy string, devices int) nodeAccount {
		return nodeAccount{offered: map[offerKey]int{{gpu.TypeMPS, policy}: devices}}
	}
	m.recordOffer(nodeAccount{}, offer("quarters", 4))
	m.recordOffer(nodeAccount{}, offer("quarters", 8))
	m.recordOffer(offer("quarters", 4), offer("halves", 2))
	if got, want := counters(t, r), "devices_offered policy=halves type=mps 2\ndevices_offered policy=quarters type=mps 8\n"; got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	m.recordOffer(offer("quarters", 8), nodeAccount{})
	if n := testutil.CollectAndCount(m.offered); n != 1 {
		t.Errorf("%d series, want 1: no GPU is under the policy quarters any more", n)
	}
}

// TestObjectMetrics has a policy of each kind, and nodes with a pool, without the one that
// they should have, and without one in order.
func TestObjectMetrics(t *testing.T) {
	applied, waits, fresh := sharing("applied", v1alpha1.SharingPolicySpec{}), sharing("waits", v1alpha1.SharingPolicySpec{}), sharing("new", v1alpha1.SharingPolicySpec{})
	applied.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonApplied}}
	waits.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonWaiting}}
	objects := []client.Object{applied, waits, fresh}
	objects = slices.Concat(objects, nodeWith("a", "", h100(0)), nodeWith("b", "", h100(0)), nodeWith("without-gpus", ""))
	withoutPool := map[string]func(*v1alpha1.GPUInventory){
		"deleted": func(inv *v1alpha1.GPUInventory) {
			inv.DeletionTimestamp, inv.Finalizers = new(metav1.Now()), []string{"example.com/test"}
		},
		"unregistered": func(inv *v1alpha1.GPUInventory) { inv.Status.RegisteredAt = nil },
		"conflicting": func(inv *v1alpha1.GPUInventory) {
			inv.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionConflicting, Status: metav1.ConditionTrue}}
		},
		"lost": func(inv *v1alpha1.GPUInventory) {
			inv.Status.GPUs[0].Conditions = []v1alpha1.GPUCondition{{Type: string(gpu.Lost)}}
		},
	}
	objects = append(objects, nodeWith("driver-failed", "")...)
	objects[len(objects)-1].(*v1alpha1.GPUInventory).Status.Conditions = []metav1.Condition{
		{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNVMLError},
	}
	hidden := []string{"b", "driver-failed"}
	for name, change := range withoutPool {
		added := nodeWith(name, "", h100(0))
		change(added[1].(*v1alpha1.GPUInventory))
		objects, hidden = append(objects, added...), append(hidden, name)
	}
	f := newFleet(t, publish.NoCounters, objects...)
	f.hidden = hidden
	var inventories v1alpha1.GPUInventoryList
	if err := f.api.List(t.Context(), &inventories); err != nil {
		t.Fatal(err)
	}
	for i := range inventories.Items {
		if _, err := f.policies.planner.forNode(t.Context(), &inventories.Items[i]); err != nil {
			t.Fatal(err)
		}
	}
	r := prometheus.NewRegistry()
	r.MustRegister(newObjectMetrics(f.api, f, f.policies.planner))
	const want = `
# HELP tessera_node_known 1 for each node with a GPUInventory.
# TYPE tessera_node_known gauge
tessera_node_known{node="a"} 1
tessera_node_known{node="b"} 1
tessera_node_known{node="conflicting"} 1
tessera_node_known{node="deleted"} 1
tessera_node_known{node="driver-failed"} 1
tessera_node_known{node="lost"} 1
tessera_node_known{node="unregistered"} 1
tessera_node_known{node="without-gpus"} 1
# HELP tessera_policy_applied Whether the SharingPolicy's condition Applied is true, with its reason.
# TYPE tessera_policy_applied gauge
tessera_policy_applied{policy="applied",reason="Applied"} 1
tessera_policy_applied{policy="waits",reason="Waiting"} 0
# HELP tessera_pool_published Whether a node that should have a pool of ResourceSlices has a complete one.
# TYPE tessera_pool_published gauge
tessera_pool_published{node="a"} 1
tessera_pool_published{node="b"} 0
tessera_pool_published{node="driver-failed"} 0
`
	if err := testutil.GatherAndCompare(r, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(r); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

func TestReasonsOfWrites(t *testing.T) {
	pool := func(generation int64, change func(*resourceapi.ResourceSlice)) *resourceapi.ResourceSlice {
		s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "n-0", Labels: map[string]string{publish.ManagedByLabel: publish.ManagedBy}}}
		s.Spec.Pool = resourceapi.ResourcePool{Name: "n", Generation: generation, ResourceSliceCount: 1}
		s.Spec.Devices = []resourceapi.Device{{Name: "gpu-11111111"}}
		if change != nil {
			change(s)
		}
		return s
	}
	tainted := func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "k", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	more := func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: "gpu-22222222"})
	}
	half := func(s *resourceapi.ResourceSlice) { s.Spec.Pool.ResourceSliceCount = 2 }
	for want, tc := range map[string]struct{ current, wanted *resourceapi.ResourceSlice }{
		reasonFirst:   {wanted: pool(1, nil)},
		reasonHealth:  {pool(1, tainted), pool(0, nil)},
		reasonDevices: {pool(1, tainted), pool(0, more)},
		reasonRepair:  {pool(1, half), pool(0, nil)},
	} {
		var current []*resourceapi.ResourceSlice
		if tc.current != nil {
			current = append(current, tc.current)
		}
		if got := reasonOf(current, []resourceapi.ResourceSlice{*tc.wanted}); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}
