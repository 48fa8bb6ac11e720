package nodes

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	draclient "k8s.io/dynamic-resource-allocation/client"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestMetricsOfPools has nodes with a pool, without the one that
// they should have, and without one in order.
func TestMetricsOfPools(t *testing.T) {
	objects := slices.Concat(controltest.NodeWith("a", "", controltest.H100(0)), controltest.NodeWith("b", "", controltest.H100(0)), controltest.NodeWith("without-gpus", ""))
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
	api, now := controltest.NewAPI(t, objects...), testingclock.NewFakeClock(time.Unix(1000, 0))
	planner := plan.New(api, controltest.NewClaims(t).Index, server.New(&controltest.Server{}, now), kinds.Definitions{Server: api, Clock: now}, nil)
	kube := fake.NewClientset()
	publisher, err := publish.New(draclient.New(kube), kube.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	var inventories v1alpha1.GPUInventoryList
	if err := api.List(t.Context(), &inventories); err != nil {
		t.Fatal(err)
	}
	for i := range inventories.Items {
		inv := &inventories.Items[i]
		in, err := planner.Input(t.Context(), inv)
		if err != nil {
			t.Fatal(err)
		}
		d, err := planner.Decide(t.Context(), inv, in)
		if err != nil {
			t.Fatal(err)
		}
		for i := range d.Pool {
			if slices.Contains(hidden, inv.Name) {
				continue
			}
			if err := publisher.Informer().GetStore().Add(&d.Pool[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	r := prometheus.NewRegistry()
	r.MustRegister(NewCollector(api, publisher, planner))
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
