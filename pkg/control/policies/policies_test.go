package policies

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	draclient "k8s.io/dynamic-resource-allocation/client"
	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/plan"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

// verdict is a status in one line.
func verdict(s v1alpha1.SharingPolicyStatus) string {
	c := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionAccepted)
	out := fmt.Sprintf("%s nodes=%d gpus=%d", c.Reason, s.Nodes, s.GPUs)
	for _, conflict := range s.Conflicts {
		out += fmt.Sprintf(" lost=%s:%d", conflict.Policy, conflict.GPUs)
	}
	return out
}

// fleet is a cluster of several nodes, and the policy reconciliation.
type fleet struct {
	api      client.WithWatch
	claims   controltest.Claims
	server   *controltest.Server
	policies *Reconciler
	events   *events.FakeRecorder
	clock    *testingclock.FakeClock
	// hidden are nodes whose slices aren't there.
	hidden []string
}

func newFleet(t *testing.T, form publish.Counters, objects ...client.Object) *fleet {
	t.Helper()
	f := &fleet{
		api: controltest.NewAPI(t, objects...), claims: controltest.NewClaims(t), server: &controltest.Server{Form: form},
		events: events.NewFakeRecorder(100),
	}
	f.restart(t)
	return f
}

// restart makes the controller forget.
func (f *fleet) restart(t *testing.T) {
	t.Helper()
	kube, now := fake.NewClientset(), testingclock.NewFakeClock(time.Unix(1000, 0))
	f.clock = now
	publisher, err := publish.New(draclient.New(kube), kube.Discovery())
	if err != nil {
		t.Fatal(err)
	}
	f.policies = New(Config{
		Client: f.api, Slices: publisher, Writes: undone.New(now), Events: f.events, Clock: now,
		Planner: plan.New(f.api, f.claims.Index, server.New(f.server, now), kinds.Definitions{Server: f.api, Clock: now}, nil),
	})
}

// warnings are the events since the last call.
func (f *fleet) warnings() []string {
	var out []string
	for len(f.events.Events) > 0 {
		out = append(out, <-f.events.Events)
	}
	return out
}

// decide returns the decision on a node.
func (f *fleet) decide(ctx context.Context, inv *v1alpha1.GPUInventory) (plan.Decision, error) {
	in, err := f.policies.Planner.Input(ctx, inv)
	if err != nil {
		return plan.Decision{}, err
	}
	return f.policies.Planner.Decide(ctx, inv, in)
}

// publish fills the cache with the slices that the policies plan.
func (f *fleet) publish(t *testing.T) {
	t.Helper()
	var list v1alpha1.GPUInventoryList
	if err := f.api.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	var all []any
	for i := range list.Items {
		inv := &list.Items[i]
		d, err := f.decide(t.Context(), inv)
		if err != nil && !errors.Is(err, plan.ErrNodeUnknown) {
			t.Fatal(err)
		}
		for i := range d.Pool {
			if !slices.Contains(f.hidden, inv.Name) {
				all = append(all, &d.Pool[i])
			}
		}
	}
	if err := f.policies.Slices.Informer().GetStore().Replace(all, ""); err != nil {
		t.Fatal(err)
	}
}

// statuses reconciles, and returns the written statuses.
func (f *fleet) statuses(t *testing.T) map[string]v1alpha1.SharingPolicyStatus {
	t.Helper()
	f.publish(t)
	if _, err := f.policies.Reconcile(t.Context(), reconcile.Request{}); err != nil {
		t.Fatal(err)
	}
	var list v1alpha1.SharingPolicyList
	if err := f.api.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	out := make(map[string]v1alpha1.SharingPolicyStatus)
	for _, s := range list.Items {
		out[s.Name] = s.Status
	}
	return out
}

func TestJudge(t *testing.T) {
	nodes := slices.Concat(
		controltest.NodeWith("a", "inference", controltest.H100(0), controltest.H100(1), controltest.L4(2)),
		controltest.NodeWith("b", "training", controltest.H100(0)),
		controltest.NodeWith("c", "empty"),
		controltest.NodeWith("d", "inference")[1:], // its Node isn't known
	)
	inference := &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "inference"}}
	onlyH100 := `device.attributes["gpu.nvidia.com"].productName == "NVIDIA H100"`
	for name, tc := range map[string]struct {
		policies []*v1alpha1.SharingPolicy
		want     map[string]string
	}{
		"everything": {
			[]*v1alpha1.SharingPolicy{controltest.Policy("a", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()})},
			map[string]string{"a": "Accepted nodes=2 gpus=4"},
		},
		"by node and GPU": {
			[]*v1alpha1.SharingPolicy{controltest.Policy("a", v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned(), NodeSelector: inference, GPUSelector: onlyH100})},
			map[string]string{"a": "Accepted nodes=1 gpus=2"},
		},
		"priority decides, and the loser hears of it": {
			[]*v1alpha1.SharingPolicy{
				controltest.Policy("broad", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}),
				controltest.Policy("narrow", v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned(), GPUSelector: onlyH100, Priority: 10}),
			},
			map[string]string{"broad": "Accepted nodes=1 gpus=1 lost=narrow:3", "narrow": "Accepted nodes=2 gpus=3"},
		},
		"all kinds of plans": {
			[]*v1alpha1.SharingPolicy{
				controltest.Policy("a", v1alpha1.SharingPolicySpec{Plan: controltest.MPS(4), Priority: 1, NodeSelector: inference}),
				controltest.Policy("b", v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}}}),
			},
			map[string]string{"a": "Accepted nodes=1 gpus=3", "b": "Accepted nodes=1 gpus=1 lost=a:3"},
		},
		"a malformed policy harms no other": {
			[]*v1alpha1.SharingPolicy{
				controltest.Policy("a", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}),
				controltest.Policy("no-cel", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: "device.foo("}),
				controltest.Policy("no-plan", v1alpha1.SharingPolicySpec{}),
			},
			map[string]string{"a": "Accepted nodes=2 gpus=4", "no-cel": "Invalid nodes=0 gpus=0", "no-plan": "Invalid nodes=0 gpus=0"},
		},
		"a selector that fails selects nothing": {
			[]*v1alpha1.SharingPolicy{controltest.Policy("a", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: `device.attributes["gpu.nvidia.com"].nonsense == "x"`})},
			map[string]string{"a": "Accepted nodes=0 gpus=0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 3 {
				objects := slices.Clone(nodes)
				for _, p := range tc.policies {
					objects = append(objects, p.DeepCopy())
				}
				rand.Shuffle(len(objects), func(i, j int) { objects[i], objects[j] = objects[j], objects[i] })
				got := make(map[string]string)
				for name, status := range newFleet(t, publish.SplitCounters, objects...).statuses(t) {
					got[name] = verdict(status)
				}
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Fatalf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

// Messages for admins must name the problem and its place.
func TestJudgeExplains(t *testing.T) {
	for name, tc := range map[string]struct {
		spec      v1alpha1.SharingPolicySpec
		form      publish.Counters
		multiple  bool
		condition string
		status    metav1.ConditionStatus // False, where empty
		reason    string                 // any, where empty
		want      string
	}{
		"malformed plan": {
			spec:      v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 1}}},
			condition: v1alpha1.ConditionAccepted, want: "spec.plan.timeSliced.replicas: Invalid value: 1: must be 2 to 64",
		},
		"shares on a server without counters": {
			spec:      v1alpha1.SharingPolicySpec{Plan: controltest.MPS(4)},
			condition: v1alpha1.ConditionApplied, status: metav1.ConditionTrue, reason: v1alpha1.ReasonAppliedWithoutWhole,
			want: "On 3 GPUs: The API server stores no shared counters (feature gate DRAPartitionableDevices), so that the whole GPU can't be offered beside its MPS shares",
		},
		"sizes on a server without consumable capacity": {
			spec: v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}}, form: publish.SplitCounters,
			condition: v1alpha1.ConditionApplied, want: "On 3 GPUs: The API server stores no consumable capacity (feature gate DRAConsumableCapacity)",
		},
		"selector": {
			spec:      v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: "1 + 1"},
			condition: v1alpha1.ConditionAccepted, want: `spec.gpuSelector: Invalid value: "1 + 1": must evaluate to bool`,
		},
		"missing values": {
			spec:      v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: `device.attributes["gpu.nvidia.com"].nonsense == "x"`},
			condition: v1alpha1.ConditionApplied, want: "no such key: nonsense",
		},
		"a profile that nothing has": {
			spec: v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned("1g.10gb", "1g.11gb")}, form: publish.SplitCounters,
			condition: v1alpha1.ConditionApplied, want: "On 2 GPUs: None of the policy's GPUs has the MIG profile 1g.11gb",
		},
		"a server without counters": {
			spec:      v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned("1g.10gb")},
			condition: v1alpha1.ConditionApplied, want: "DRAPartitionableDevices",
		},
		"a selector that selects nothing": {
			spec:      v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), NodeSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "misspelt"}}},
			condition: v1alpha1.ConditionApplied, reason: v1alpha1.ReasonNoGPUs, want: "The policy applies to no GPU",
		},
		"a selector that asks whether a value is there": {
			spec:      v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: `device.attributes["gpu.nvidia.com"].?fabricClique.orValue("") == "x"`},
			condition: v1alpha1.ConditionApplied, want: "The policy applies to no GPU",
		},
		"a layout that is too much": {
			spec:      v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: []string{"3g.40gb", "3g.40gb", "3g.40gb"}}}},
			condition: v1alpha1.ConditionApplied, want: "layout",
		},
		"a scheduler that allocates twice": {
			spec: v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}}, form: publish.SplitCounters, multiple: true,
			condition: v1alpha1.ConditionApplied, status: metav1.ConditionTrue, reason: v1alpha1.ReasonAppliedWithoutWhole,
			want: "On 3 GPUs: Kubernetes v1.36.1 can allocate the same part of a GPU twice where shares that are allocated several times consume counters " +
				"(kubernetes/kubernetes#139034); Kubernetes 1.36.2, 1.37.0 and later are fixed. The whole GPU isn't offered beside its MPS shares",
		},
		"a scheduler that allocates partitions twice": {
			spec: v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{MPS: &v1alpha1.PartitionMPS{Shares: 2}}}}, form: publish.SplitCounters, multiple: true,
			condition: v1alpha1.ConditionApplied, reason: v1alpha1.ReasonUnsafeScheduler, want: "kubernetes/kubernetes#139034",
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, tc.form, append(controltest.NodeWith("n", "", controltest.H100(0), controltest.H100(1), controltest.L4(2)), controltest.Policy("a", tc.spec))...)
			f.server.Multiple = tc.multiple
			c := meta.FindStatusCondition(f.statuses(t)["a"].Conditions, tc.condition)
			status := tc.status
			if status == "" {
				status = metav1.ConditionFalse
			}
			if c == nil || c.Status != status || !strings.Contains(c.Message, tc.want) || tc.reason != "" && c.Reason != tc.reason {
				t.Errorf("got  %+v\nwant %q in it, and reason %q", c, tc.want, tc.reason)
			}
		})
	}
}

// A layout may be for several models: a missing profile is reported for the
// model that lacks it.
func TestLayoutForSeveralModels(t *testing.T) {
	other := controltest.H100(1)
	other.MIG.Profiles = other.MIG.Profiles[1:]
	plan := v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: []string{"1g.10gb"}}}
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.H100(0), other), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: plan}))...)
	got := f.statuses(t)["p"].Problems
	if len(got) != 1 || got[0].Example != "n/gpu-00000001" || !strings.Contains(got[0].Message, "It has no profile 1g.10gb (spec.plan.partitioned.layout[0])") {
		t.Errorf("got %+v", got)
	}
}

func TestStatusNamesWhomItServes(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, slices.Concat(
		controltest.NodeWith("b", "", controltest.H100(0)), controltest.NodeWith("a", "", controltest.H100(1), controltest.H100(0)),
		[]client.Object{controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned("3g.40gb")})})...)
	f.claims.Have("a", controltest.Devices{"ns/planned": {"gpu-00000000-mig-3g40gb-0"}, "ns/old": {"gpu-00000001-mig-1g10gb-2"}})
	got := f.statuses(t)["p"]
	want := v1alpha1.SharingPolicyStatus{
		ObservedGeneration: 1, Nodes: 2, GPUs: 3,
		Served:         []v1alpha1.ServedNode{{Node: "a", GPUs: []string{"gpu-00000000", "gpu-00000001"}}, {Node: "b", GPUs: []string{"gpu-00000000"}}},
		WaitingDevices: 1, Waiting: []v1alpha1.WaitingDevice{{Node: "a", Device: "gpu-00000001-mig-1g10gb-2", Claim: "ns/old"}},
		Accepted:   &v1alpha1.AcceptedForm{Generation: 1, Spec: v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned("3g.40gb")}},
		Conditions: got.Conditions,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if c := meta.FindStatusCondition(got.Conditions, v1alpha1.ConditionApplied); c.Status != metav1.ConditionFalse || c.Reason != v1alpha1.ReasonWaiting {
		t.Errorf("got %+v", c)
	}
	f.claims.Have("a", nil)
	if c := meta.FindStatusCondition(f.statuses(t)["p"].Conditions, v1alpha1.ConditionApplied); c.Status != metav1.ConditionTrue {
		t.Errorf("the claims are gone; got %+v", c)
	}
}

// A device that several claims have is one device, and each claim is named.
func TestStatusNamesAllClaimsOfADevice(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.H100(0), controltest.H100(1)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	f.claims.Have("n", controltest.Devices{"ns/one": {"gpu-00000000-mps", "gpu-00000001-mps"}, "ns/two": {"gpu-00000000-mps"}})
	got := f.statuses(t)["p"]
	want := []v1alpha1.WaitingDevice{
		{Node: "n", Device: "gpu-00000000-mps", Claim: "ns/one"}, {Node: "n", Device: "gpu-00000000-mps", Claim: "ns/two"},
		{Node: "n", Device: "gpu-00000001-mps", Claim: "ns/one"},
	}
	if diff := cmp.Diff(want, got.Waiting); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got.WaitingDevices != 2 {
		t.Errorf("%d devices wait, want 2", got.WaitingDevices)
	}
}

// The same facts must not be told in other words each time, because each time
// would be a write.
func TestJudgeSaysTheSameAgain(t *testing.T) {
	var objects []client.Object
	for i := range 40 { // more than the status has room for
		objects = append(objects, controltest.NodeWith(fmt.Sprintf("n%02d", i), "", controltest.L4(0), controltest.L4(1))...)
	}
	f := newFleet(t, publish.SplitCounters, append(objects,
		controltest.Policy("failing", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: `device.attributes["gpu.nvidia.com"].nonsense == "x"`}),
		controltest.Policy("serving", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	first := f.statuses(t)
	if n := len(first["serving"].Served); n != v1alpha1.MaxServedNodes || first["serving"].Nodes != 40 {
		t.Errorf("%d nodes are named, %d counted", n, first["serving"].Nodes)
	}
	if p := first["failing"].Problems; len(p) != 1 || p[0].GPUs != 80 || p[0].Example != "n00/gpu-00000000" {
		t.Errorf("got %+v, want the first GPU by name in it", p)
	}
	version := func() string {
		var list v1alpha1.SharingPolicyList
		if err := f.api.List(t.Context(), &list); err != nil {
			t.Fatal(err)
		}
		return list.Items[0].ResourceVersion + list.Items[1].ResourceVersion
	}
	before := version()
	for range 3 {
		f.restart(t)
		f.statuses(t)
	}
	if version() != before {
		t.Error("statuses were written again")
	}
}
