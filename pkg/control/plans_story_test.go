//go:build integration

package control_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// newMIGNode is a node of H100s that can be cut into 1g.10gb and 3g.40gb. It
// is labelled with its name.
func newMIGNode(t *testing.T, gpus int) *node {
	t.Helper()
	n := newNode(t, gpus)
	for i := range n.facts.GPUs {
		n.facts.GPUs[i].MIG = &gpu.MIG{Switchable: true, Profiles: []gpu.Profile{
			{Name: "1g.10gb", ID: 19, MaxInstances: 7, MemoryBytes: 10 << 30, Engines: gpu.Engines{Multiprocessors: 16}, Placements: placements(1, 0, 1, 2, 3, 4, 5, 6)},
			{Name: "3g.40gb", ID: 9, MaxInstances: 2, MemoryBytes: 40 << 30, Engines: gpu.Engines{Multiprocessors: 60}, Placements: placements(4, 0, 4)},
		}}
	}
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
		t.Fatal(err)
	}
	change(t, object, func() { object.Labels = map[string]string{"node": n.name} })
	return n
}

func placements(size int, starts ...int) []gpu.Placement {
	var out []gpu.Placement
	for _, s := range starts {
		out = append(out, gpu.Placement{Start: s, Size: size})
	}
	return out
}

// change writes an object, and retries after conflicts.
func change(t *testing.T, o client.Object, how func()) {
	t.Helper()
	eventually(t, "the change is stored", func() bool {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			t.Fatal(err)
		}
		how()
		return api.Update(t.Context(), o) == nil
	})
}

// governs makes a policy for one node.
func (n *node) governs(t *testing.T, plan v1alpha1.Plan) *v1alpha1.SharingPolicy {
	t.Helper()
	p := newPolicy(t, plan)
	p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"node": n.name}}
	if err := api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

// devices counts what is offered by kind: "gpu", a profile, "mps", "timeslice",
// or "leftover" where it isn't a partition.
func (n *node) devices(t *testing.T) map[string]int {
	t.Helper()
	out := make(map[string]int)
	for _, s := range n.pool(t) {
		for _, d := range s.Spec.Devices {
			kind := *d.Attributes["type"].StringValue
			if p := d.Attributes["profile"].StringValue; p != nil {
				kind = *p
			}
			if d.AllowMultipleAllocations != nil {
				kind += " for several"
			}
			out[kind]++
		}
	}
	return out
}

func (n *node) waitForDevices(t *testing.T, want map[string]int) {
	t.Helper()
	begun := time.Now()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s offers %v", n.name, n.devices(t))
		}
	})
	eventually(t, fmt.Sprintf("%s offers %v", n.name, want), func() bool { return cmp.Equal(want, n.devices(t)) })
	t.Logf("%s: offers %v after %s", n.name, want, time.Since(begun).Round(time.Millisecond))
}

// give allocates a device to a claim, as the scheduler does.
func (n *node) give(t *testing.T, device string) *resourceapi.ResourceClaim {
	t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{GenerateName: "claim-"}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "any"}}}
	claim, err := claims.Create(t.Context(), claim, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: "gpu.nvidia.com", Pool: n.name, Device: device}},
	}}
	claim, err = claims.UpdateStatus(t.Context(), claim, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return claim
}

func release(t *testing.T, claim *resourceapi.ResourceClaim) {
	t.Helper()
	if err := claims.Delete(t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// applied waits until a policy's status says so, and returns the message.
func applied(t *testing.T, p *v1alpha1.SharingPolicy, reason string) string {
	t.Helper()
	var c *metav1.Condition
	eventually(t, "the policy is "+reason, func() bool {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
			t.Fatal(err)
		}
		c = meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionApplied)
		return c != nil && c.Reason == reason && c.ObservedGeneration == p.Generation
	})
	return c.Message
}

func TestPartitionsAreOfferedWithCounters(t *testing.T) {
	startController(t)
	n := newMIGNode(t, 9)
	n.report(t)
	n.startPlugin(t)
	pool := n.waitForPool(t, 9)
	sets := make(map[string]bool)
	for _, s := range pool {
		for _, c := range s.Spec.SharedCounters {
			sets[c.Name] = true
		}
	}
	if len(sets) != 9 {
		t.Errorf("%d counter sets are stored, want one a GPU", len(sets))
	}
	for _, s := range pool {
		for _, d := range s.Spec.Devices {
			if len(d.ConsumesCounters) != 1 || !sets[d.ConsumesCounters[0].CounterSet] {
				t.Errorf("device %s consumes %v", d.Name, d.ConsumesCounters)
			}
		}
	}
	if diff := cmp.Diff(map[string]int{"gpu": 9, "1g.10gb": 63, "3g.40gb": 18}, n.devices(t)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// A running pod keeps its device whatever the admin changes, and nothing waits
// for it but what is in its way.
func TestPlanChangesUnderAClaim(t *testing.T) {
	startController(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	n.waitForDevices(t, map[string]int{"gpu": 2, "1g.10gb": 14, "3g.40gb": 4})
	claim := n.give(t, "gpu-00000001-mig-3g40gb-4")
	asked := n.inventory(t).Spec.PublishRequest

	p := n.governs(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.10gb"}}})
	n.waitForDevices(t, map[string]int{"gpu": 2, "1g.10gb": 14, "3g.40gb": 1})
	if got := applied(t, p, v1alpha1.ReasonWaiting); !strings.Contains(got, claim.Name) {
		t.Errorf("got %q, want the claim's name in it", got)
	}
	want := []v1alpha1.WaitingDevice{{Node: n.name, Device: "gpu-00000001-mig-3g40gb-4", Claim: "default/" + claim.Name}}
	if diff := cmp.Diff(want, p.Status.Waiting); diff != "" {
		t.Errorf("waiting (-want +got):\n%s", diff)
	}
	if want := []v1alpha1.ServedNode{{Node: n.name, GPUs: []string{"gpu-00000000", "gpu-00000001"}}}; !cmp.Equal(want, p.Status.Served) {
		t.Errorf("served (-want +got):\n%s", cmp.Diff(want, p.Status.Served))
	}
	release(t, claim)
	n.waitForDevices(t, map[string]int{"gpu": 2, "1g.10gb": 14})
	applied(t, p, v1alpha1.ReasonApplied)

	change(t, p, func() { p.Spec.Plan = v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}} })
	n.waitForDevices(t, map[string]int{"gpu": 2})
	if err := api.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	n.waitForDevices(t, map[string]int{"gpu": 2, "1g.10gb": 14, "3g.40gb": 4})
	if got := n.inventory(t).Spec.PublishRequest; got != asked {
		t.Errorf("changes of plan asked the plugin %d times", got-asked)
	}
}

// A claim that comes and goes in a steady state costs no write.
func TestClaimsCostNoWrites(t *testing.T) {
	startController(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	p := n.governs(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}})
	n.waitForDevices(t, map[string]int{"gpu": 2, "1g.10gb": 14, "3g.40gb": 4})
	applied(t, p, v1alpha1.ReasonApplied)
	somethingElseHappens(t)
	before, policyBefore := versions(n.pool(t), n.inventory(t)), p.ResourceVersion
	for range 3 {
		release(t, n.give(t, "gpu-00000001-mig-1g10gb-6"))
	}
	somethingElseHappens(t)
	if diff := cmp.Diff(before, versions(n.pool(t), n.inventory(t))); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
	if applied(t, p, v1alpha1.ReasonApplied); p.ResourceVersion != policyBefore {
		t.Error("the policy's status was written")
	}
}

func TestKeepWarmReachesTheNode(t *testing.T) {
	startController(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	p := n.governs(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{KeepWarm: &metav1.Duration{Duration: time.Minute}}})
	warm := func() (out []string) {
		for _, g := range n.inventory(t).Spec.GPUs {
			out = append(out, g.UUID[:12]+" "+g.KeepWarm.Duration.String())
		}
		return out
	}
	eventually(t, "both GPUs are to be kept warm", func() bool { return cmp.Equal(warm(), []string{"GPU-00000000 1m0s", "GPU-00000001 1m0s"}) })
	n.wipe(t) // the kubelet starts: the number that is raised lives beside it
	n.waitForDevices(t, map[string]int{"gpu": 2, "1g.10gb": 14, "3g.40gb": 4})
	if len(warm()) != 2 || n.inventory(t).Spec.PublishRequest == 0 {
		t.Errorf("the inventory's spec is %+v", n.inventory(t).Spec)
	}
	if err := api.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing is to be kept warm", func() bool { return len(warm()) == 0 })
}

// Shares are offered according to the policy's plan, and its status is correct,
// while claims are created and deleted.
func TestSharesAreOffered(t *testing.T) {
	startController(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	p := n.governs(t, v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: ptr.To[int32](4)}})
	n.waitForDevices(t, map[string]int{"gpu": 2, "mps": 8})
	applied(t, p, v1alpha1.ReasonApplied)
	if p.Status.GPUs != 2 || p.Status.Nodes != 1 {
		t.Errorf("got %+v", p.Status)
	}
	claim := n.give(t, "gpu-00000001-mps4-3")
	change(t, p, func() {
		p.Spec.Plan = v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}
	})
	n.waitForDevices(t, map[string]int{"gpu": 1, "mps for several": 1, "leftover": 1})
	if got := applied(t, p, v1alpha1.ReasonWaiting); !strings.Contains(got, "gpu-00000001-mps4-3 of node "+n.name+", which claim default/"+claim.Name+" has") {
		t.Errorf("got %q", got)
	}
	release(t, claim)
	n.waitForDevices(t, map[string]int{"gpu": 2, "mps for several": 2})
	applied(t, p, v1alpha1.ReasonApplied)
	change(t, p, func() {
		p.Spec.Plan = v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"3g.40gb"}, MPS: &v1alpha1.PartitionMPS{Shares: 2}}}
	})
	n.waitForDevices(t, map[string]int{"gpu": 2, "3g.40gb for several": 4})
	applied(t, p, v1alpha1.ReasonApplied)
}

func TestTimeSliceReachesTheNode(t *testing.T) {
	startController(t)
	n := newMIGNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	p := n.governs(t, v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 3, Interval: v1alpha1.LongTimeSlice}})
	told := func() (out []string) {
		for _, g := range n.inventory(t).Spec.GPUs {
			out = append(out, g.UUID[:12]+" "+string(g.TimeSlice))
		}
		return out
	}
	n.waitForDevices(t, map[string]int{"gpu": 2, "timeslice": 6})
	applied(t, p, v1alpha1.ReasonApplied)
	if diff := cmp.Diff([]string{"GPU-00000000 Long", "GPU-00000001 Long"}, told()); diff != "" {
		t.Errorf("what the node is told (-want +got):\n%s", diff)
	}
	claim := n.give(t, "gpu-00000001-ts3-0")
	if err := api.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	n.waitForDevices(t, map[string]int{"gpu": 1, "leftover": 1, "1g.10gb": 7, "3g.40gb": 2})
	eventually(t, "only the GPU with a replica has a time slice", func() bool { return cmp.Equal(told(), []string{"GPU-00000001 Long"}) })
	release(t, claim)
	n.waitForDevices(t, map[string]int{"gpu": 2, "1g.10gb": 14, "3g.40gb": 4})
	eventually(t, "the time slice is nobody's business", func() bool { return len(told()) == 0 })
}
