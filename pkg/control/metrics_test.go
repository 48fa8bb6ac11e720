package control

import (
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestOffersAreCounted reports a node with two GPUs, and takes it away again.
func TestOffersAreCounted(t *testing.T) {
	s := newFixture(t)
	r := s.metrics
	s.nodes.slices = countedSlices{s.store, newMetrics(r).writes}
	s.published()
	const want = "devices_offered policy= type=gpu 2\nslice_writes_total reason=first 1\n"
	if got := controltest.Metrics(t, r); got != want {
		t.Errorf("got:\n%swant:\n%s", got, want)
	}
	problems, err := testutil.GatherAndLint(r)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	s.nodes.forgetNode("n")
	if got, want := controltest.Metrics(t, r), "slice_writes_total reason=first 1\n"; got != want {
		t.Errorf("without the node, got:\n%swant:\n%s", got, want)
	}
}

// TestObjectMetrics has a policy of each kind, and nodes with a pool, without the one that
// they should have, and without one in order.
func TestObjectMetrics(t *testing.T) {
	applied, waits, fresh := controltest.Policy("applied", v1alpha1.SharingPolicySpec{}), controltest.Policy("waits", v1alpha1.SharingPolicySpec{}), controltest.Policy("new", v1alpha1.SharingPolicySpec{})
	applied.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonApplied}}
	waits.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionApplied, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonWaiting}}
	objects := []client.Object{applied, waits, fresh}
	objects = slices.Concat(objects, controltest.NodeWith("a", "", controltest.H100(0)), controltest.NodeWith("b", "", controltest.H100(0)), controltest.NodeWith("without-gpus", ""))
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
	objects = append(objects, controltest.NodeWith("driver-failed", "")...)
	objects[len(objects)-1].(*v1alpha1.GPUInventory).Status.Conditions = []metav1.Condition{
		{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNVMLError},
	}
	hidden := []string{"b", "driver-failed"}
	for name, change := range withoutPool {
		added := controltest.NodeWith(name, "", controltest.H100(0))
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
		if _, err := f.decide(t.Context(), &inventories.Items[i]); err != nil {
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
