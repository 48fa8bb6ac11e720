package view_test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/kubectl/view"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/test/allocators"
)

var (
	seed   = flag.Uint64("seed", rand.Uint64(), "seed of the random states; printed with a failure")
	states = flag.Int("states", 60, "random states to compare")
)

// requests are what claims ask for at random.
func requests() []allocators.Request {
	out := []allocators.Request{{Kind: "gpu"}, {Kind: "mps"}, {Kind: "timeslice"}, {Kind: "mps", Capacity: map[resourceapi.QualifiedName]string{"memory": "13Gi"}}}
	for _, profile := range []string{"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb"} {
		out = append(out, allocators.Request{Kind: "mig", Profile: profile}, allocators.Request{Kind: "mps", Profile: profile})
	}
	return out
}

func plans() []v1alpha1.Plan {
	shares, clients, step := int32(3), int32(5), resource.MustParse("2Gi")
	return []v1alpha1.Plan{
		{Exclusive: &v1alpha1.ExclusivePlan{}},
		{Partitioned: &v1alpha1.PartitionedPlan{}},
		{Partitioned: &v1alpha1.PartitionedPlan{MPS: &v1alpha1.PartitionMPS{Shares: 2}}},
		{Partitioned: &v1alpha1.PartitionedPlan{Layout: []string{"3g.40gb", "2g.20gb", "1g.10gb"}}},
		{MPS: &v1alpha1.MPSPlan{Shares: &shares}},
		{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: &step, MaxClients: &clients}}},
		{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: &step, MaxClients: &clients, ServesGPUClass: true}}},
		{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 3}},
	}
}

// cluster has a node of two H100s under one plan, with claims that came and went.
func cluster(t *testing.T, random *rand.Rand, plan v1alpha1.Plan) *allocators.Cluster {
	t.Helper()
	n, err := offertest.Node("h100-80gb", 2)
	if err != nil {
		t.Fatal(err)
	}
	c := &allocators.Cluster{
		Node: n, Plans: offertest.OnePlan(n, plan), Allocator: allocators.NewLibrary(),
		Server: allocators.Server{Server: offer.Server{Counters: true, Multiple: true, Charged: true, MaxTainted: 64}, Form: publish.SplitCounters},
	}
	if random.IntN(4) == 0 {
		c.Node.GPUs[0].Conditions = []gpu.Condition{{Type: gpu.ResetRequired, Message: "XID 95"}}
	}
	c.Publish()
	all := requests()
	for i := range random.IntN(12) {
		if _, err := c.Ask(t.Context(), fmt.Sprint("claim-", i), all[random.IntN(len(all))]); err != nil {
			t.Fatal(err)
		}
		for name := range c.Claims {
			if random.IntN(6) == 0 {
				delete(c.Claims, name)
			}
		}
	}
	c.Publish()
	return c
}

func objects(c *allocators.Cluster) view.Objects {
	inv := v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: c.Node.Name}}
	inventory.SetFacts(&inv.Status, c.Node)
	o := view.Objects{Inventories: []v1alpha1.GPUInventory{inv}}
	for _, s := range c.Slices() {
		o.Slices = append(o.Slices, *s)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Claims)) {
		o.Claims = append(o.Claims, *c.Claims[name])
	}
	return o
}

// TestFits: as many claims of each kind as the model says, and not one more, are
// allocated by the scheduler's allocator, one after the other.
func TestFits(t *testing.T) {
	t.Logf("-seed %d", *seed)
	for i := range *states {
		random := rand.New(rand.NewPCG(*seed, uint64(i)))
		plan := plans()[i%len(plans())]
		c := cluster(t, random, plan)
		total := make(map[string]int)
		for _, g := range view.Build(objects(c)).Nodes[0].GPUs {
			for _, f := range g.Fits {
				total[f.Type+" "+f.Profile] += f.Count
			}
		}
		for _, r := range requests() {
			if r.Capacity != nil || plan.MPS != nil && plan.MPS.Consumable != nil && plan.MPS.Consumable.ServesGPUClass && r.Kind == "gpu" {
				continue // not a claim for what there is, or the same as one of the class for shares
			}
			if plan.Partitioned != nil && r.Kind == "mps" && r.Profile == "" {
				continue // any profile
			}
			if got := ask(t, *c, r); got != total[r.Kind+" "+r.Profile] {
				t.Errorf("-seed %d, state %d: plan %+v: %d more claims for %s are allocated, and the model has room for %d", *seed, i, plan, got, r, total[r.Kind+" "+r.Profile])
			}
		}
	}
}

// ask counts the claims that are allocated until one isn't.
func ask(t *testing.T, c allocators.Cluster, r allocators.Request) (n int) {
	t.Helper()
	c.Claims = maps.Clone(c.Claims)
	for {
		got, err := c.Ask(t.Context(), fmt.Sprint("another-", n), r)
		if err != nil {
			t.Fatal(err)
		}
		if got == nil {
			return n
		}
		n++
	}
}

// TestLargestShare: a claim gets the largest share that the model names, and no larger
// one.
func TestLargestShare(t *testing.T) {
	for i := range 20 {
		random := rand.New(rand.NewPCG(*seed, uint64(i)))
		c := cluster(t, random, plans()[5])
		most := int64(0)
		for _, g := range view.Build(objects(c)).Nodes[0].GPUs {
			for _, f := range g.Fits {
				most = max(most, f.MaxMemoryBytes)
			}
		}
		for bytes, want := range map[int64]bool{most: most > 0, most + 1: false} {
			q := resource.NewQuantity(max(1, bytes), resource.BinarySI)
			got := ask(t, *c, allocators.Request{Kind: "mps", Capacity: map[resourceapi.QualifiedName]string{"memory": q.String()}}) > 0
			if got != want {
				t.Errorf("-seed %d, state %d: a share of %d bytes is allocated: %v; the largest is %d", *seed, i, bytes, got, most)
			}
		}
	}
}

// TestUses: where a device is, and whose it is.
func TestUses(t *testing.T) {
	c := cluster(t, rand.New(rand.NewPCG(1, 1)), plans()[1])
	c.Node.GPUs[0].Conditions = []gpu.Condition{{Type: gpu.NVLinkDown, Message: "link 3"}}
	c.Claims = nil
	c.Publish()
	for name, r := range map[string]allocators.Request{"three": {Kind: "mig", Profile: "3g.40gb"}} {
		if _, err := c.Ask(t.Context(), name, r); err != nil {
			t.Fatal(err)
		}
	}
	c.Claims["three"].UID = "u3"
	c.Claims["three"].Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "train", UID: "p1"}}
	o := objects(c)
	o.Pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "train", UID: types.UID("p1")}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}}
	o.Policies = []v1alpha1.SharingPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "cut"}, Status: v1alpha1.SharingPolicyStatus{
		Served: []v1alpha1.ServedNode{{Node: c.Node.Name, GPUs: []string{"gpu-00000001"}}},
	}}}
	place := &view.Placement{Start: 4, Size: 4}
	want := []view.Use{{
		Device: "gpu-00000001-mig-3g40gb-4", Type: "mig", Profile: "3g.40gb", Placement: place, MemoryBytes: 40448 << 20,
		Claim: view.Claim{Namespace: "ns", Name: "three", UID: "u3"},
		Pods:  []view.Pod{{Namespace: "ns", Name: "train", UID: "p1", Phase: "Running"}},
	}}
	g := view.Build(o).Nodes[0].GPUs[0]
	if diff := cmp.Diff(want, g.Uses); diff != "" {
		t.Errorf("with everything (-want +got):\n%s", diff)
	}
	if g.Policy != "cut" || g.MemorySlices != 8 || len(g.Conditions) != 1 || !g.Offered || g.Index != 0 {
		t.Errorf("%+v", g)
	}
	// Who may not read inventories, pods and policies sees the same device.
	want[0].Pods[0].Phase = ""
	o.Inventories, o.Pods, o.Policies = nil, nil, nil
	g = view.Build(o).Nodes[0].GPUs[0]
	if diff := cmp.Diff(want, g.Uses); diff != "" {
		t.Errorf("with slices and claims only (-want +got):\n%s", diff)
	}
	if g.UUID != string(c.Node.GPUs[0].UUID) || g.MemorySlices != 8 || g.Model == "" || g.MemoryBytes == 0 {
		t.Errorf("%+v", g)
	}
}

// TestOtherPool: devices of a pool that isn't the node's are none of this driver's.
func TestOtherPool(t *testing.T) {
	o := objects(cluster(t, rand.New(rand.NewPCG(1, 1)), plans()[1]))
	want := view.Build(o)
	for _, s := range slices.Clone(o.Slices) {
		s.Spec.Pool.Name, s.Spec.Pool.Generation = "other", s.Spec.Pool.Generation+1
		s.Spec.Devices = nil
		o.Slices = append(o.Slices, s)
	}
	if diff := cmp.Diff(want, view.Build(o)); diff != "" {
		t.Errorf("with slices of another pool (-without +with):\n%s", diff)
	}
}

// TestClaimOnly checks that a node that only a claim names has the reason why nothing fits.
func TestClaimOnly(t *testing.T) {
	c := cluster(t, rand.New(rand.NewPCG(1, 1)), plans()[0])
	c.Claims = nil
	if _, err := c.Ask(t.Context(), "one", allocators.Request{Kind: "gpu"}); err != nil || len(c.Claims) != 1 {
		t.Fatal(c.Claims, err)
	}
	n := view.Build(view.Objects{Claims: objects(c).Claims}).Nodes[0]
	if len(n.Problems) != 1 || len(n.GPUs) != 1 || len(n.GPUs[0].Uses) != 1 {
		t.Errorf("%+v", n)
	}
}

// TestIncompletePool: nothing fits while slices are being written.
func TestIncompletePool(t *testing.T) {
	o := objects(cluster(t, rand.New(rand.NewPCG(1, 1)), plans()[1]))
	o.Slices = o.Slices[1:]
	n := view.Build(o).Nodes[0]
	if len(n.Problems) != 1 || n.GPUs[0].Offered || len(n.GPUs[0].Fits) != 0 {
		t.Errorf("%+v", n)
	}
}

// TestGPUsWithoutNames checks that GPUs whose UUIDs give no name are shown, and hide no other,
// and that those without a UUID are counted.
func TestGPUsWithoutNames(t *testing.T) {
	n, err := offertest.Node("l4", 4)
	if err != nil {
		t.Fatal(err)
	}
	named := n.GPUs[0].UUID
	n.GPUs[1].UUID = "1833c8b5-9aa0-5382-b784-68b7e77eb185"
	n.GPUs[3].UUID = n.GPUs[2].UUID
	inv := v1alpha1.GPUInventory{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
	inventory.SetFacts(&inv.Status, n)
	inv.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionUnidentifiedGPUs, Status: metav1.ConditionTrue, Reason: "NotIdentified", Message: "NVML lists 5 GPUs, 4 are identified",
	}}
	shown := view.Build(view.Objects{Inventories: []v1alpha1.GPUInventory{inv}}).Nodes[0]
	if !slices.Contains(shown.Problems, "NotIdentified: NVML lists 5 GPUs, 4 are identified") {
		t.Errorf("problems %q, want the GPUs that aren't identified", shown.Problems)
	}
	var got []string
	for _, g := range shown.GPUs {
		got = append(got, fmt.Sprintf("%d %s %q", g.Index, g.UUID, g.Device))
	}
	name, _ := gpu.NameAll(n.GPUs).Name(gpu.Whole{GPU: named})
	want := []string{
		fmt.Sprintf("0 %s %q", named, name), fmt.Sprintf("1 %s %q", n.GPUs[1].UUID, ""),
		fmt.Sprintf("2 %s %q", n.GPUs[2].UUID, ""), fmt.Sprintf("3 %s %q", n.GPUs[2].UUID, ""),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("index, UUID, device (-want +got):\n%s", diff)
	}
}
