package policies

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

func condition(s v1alpha1.SharingPolicyStatus, kind string) metav1.Condition {
	if c := meta.FindStatusCondition(s.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// edit changes a policy's spec as an administrator does.
func (f *fleet) edit(t *testing.T, name string, change func(*v1alpha1.SharingPolicySpec)) {
	t.Helper()
	p := &v1alpha1.SharingPolicy{}
	if err := f.api.Get(t.Context(), client.ObjectKey{Name: name}, p); err != nil {
		t.Fatal(err)
	}
	change(&p.Spec)
	p.Generation++
	if err := f.api.Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
}

// plan returns which policy and plan the first GPU of a node is under.
func (f *fleet) plan(t *testing.T, node string) (policy string, plan v1alpha1.Plan) {
	t.Helper()
	inv := &v1alpha1.GPUInventory{}
	if err := f.api.Get(t.Context(), client.ObjectKey{Name: node}, inv); err != nil {
		t.Fatal(err)
	}
	d, err := f.decide(t.Context(), inv)
	if err != nil {
		t.Fatal(err)
	}
	v := d.Account.GPUs[0].Verdict
	return v.Policy, v.Plan
}

// One wrong character in a policy must not give its GPUs another plan, whoever
// is the controller now, until the policy is deleted.
func TestRefusedPolicyStaysAsItWas(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.H100(0)),
		controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: `device.attributes["gpu.nvidia.com"].productName == "NVIDIA H100"`}))...)
	if got := f.statuses(t)["p"]; verdict(got) != "Accepted nodes=1 gpus=1" || got.Accepted == nil || got.Accepted.Generation != 1 {
		t.Fatalf("before: %s, accepted form %+v", verdict(got), got.Accepted)
	}
	f.edit(t, "p", func(s *v1alpha1.SharingPolicySpec) { s.GPUSelector += "(" })
	for _, when := range []string{"at once", "after a restart", "after another"} {
		got := f.statuses(t)["p"]
		if policy, plan := f.plan(t, "n"); policy != "p" || plan.Exclusive == nil {
			t.Errorf("%s: the GPU is under %q, %+v", when, policy, plan)
		}
		accepted, applied := condition(got, v1alpha1.ConditionAccepted), condition(got, v1alpha1.ConditionApplied)
		if accepted.Status != metav1.ConditionFalse || !strings.Contains(accepted.Message, "spec.gpuSelector") ||
			!strings.Contains(accepted.Message, "generation 1 stays in force") || accepted.ObservedGeneration != 2 {
			t.Errorf("%s: %+v", when, accepted)
		}
		if applied.Status != metav1.ConditionFalse || applied.Reason != v1alpha1.ReasonInvalid || got.GPUs != 1 {
			t.Errorf("%s: %+v, %d GPUs", when, applied, got.GPUs)
		}
		f.restart(t)
	}
	f.edit(t, "p", func(s *v1alpha1.SharingPolicySpec) { s.GPUSelector, s.Plan = "", controltest.MPS(4) })
	got := f.statuses(t)["p"]
	if _, plan := f.plan(t, "n"); plan.MPS == nil || got.Accepted.Generation != 3 || condition(got, v1alpha1.ConditionApplied).Status != metav1.ConditionTrue {
		t.Errorf("corrected: %+v, %+v", plan, got)
	}
	f.edit(t, "p", func(s *v1alpha1.SharingPolicySpec) { s.GPUSelector = "(" })
	f.statuses(t)
	if err := f.api.Delete(t.Context(), controltest.Policy("p", v1alpha1.SharingPolicySpec{})); err != nil {
		t.Fatal(err)
	}
	if policy, plan := f.plan(t, "n"); policy != "" || plan.Partitioned == nil {
		t.Errorf("deleted, and the GPU is under %q, %+v", policy, plan)
	}
}

// A policy that was never accepted applies to nothing, and says so; one that
// was deleted and created again is another policy.
func TestPolicyThatWasNeverAccepted(t *testing.T) {
	refused := controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: "("})
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.H100(0)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	f.statuses(t)
	if err := f.api.Delete(t.Context(), refused.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	refused.UID = "another"
	if err := f.api.Create(t.Context(), refused); err != nil {
		t.Fatal(err)
	}
	got := f.statuses(t)["p"]
	if policy, _ := f.plan(t, "n"); policy != "" || got.Accepted != nil || got.GPUs != 0 {
		t.Errorf("the GPU is under %q; %+v", policy, got)
	}
	if c := condition(got, v1alpha1.ConditionAccepted); !strings.Contains(c.Message, "the policy applies to no GPU") {
		t.Errorf("got %+v", c)
	}
}

// Removing the definition of SharingPolicies removes them all: GPUs keep their
// plans.
func TestPoliciesThatGoWithTheirKind(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.H100(0)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	f.statuses(t)
	controltest.Undefine(t, f.api, kinds.SharingPolicies)
	if err := f.api.Delete(t.Context(), controltest.Policy("p", v1alpha1.SharingPolicySpec{})); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := f.policies.Planner.Common(t.Context()); !errors.Is(err, kinds.ErrGone) {
			t.Errorf("got %v, want that the kind is gone", err)
		}
	}
	controltest.Define(t, f.api, kinds.SharingPolicies, time.Time{}) // the definition is back, the policies aren't
	if policy, _ := f.plan(t, "n"); policy != "" {
		t.Errorf("the GPU is under %q", policy)
	}
}

// A policy is applied when its GPUs can be had, and not before.
func TestAppliedMeansPublished(t *testing.T) {
	for name, tc := range map[string]struct {
		node    func(*v1alpha1.GPUInventoryStatus)
		hidden  bool
		message string
	}{
		"published": {},
		"not yet":   {hidden: true, message: "its node's ResourceSlices have not been written"},
		"conflicting": {func(s *v1alpha1.GPUInventoryStatus) {
			s.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionConflicting, Status: metav1.ConditionTrue, Reason: "DevicePlugin"}}
		}, true, "another driver serves its node's GPUs"},
		"not registered": {func(s *v1alpha1.GPUInventoryStatus) { s.RegisteredAt = nil }, true, "its node's plugin isn't registered with the kubelet"},
		"silent": {func(s *v1alpha1.GPUInventoryStatus) {
			s.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonPluginSilent}}
		}, true, "its node's plugin doesn't answer"},
	} {
		t.Run(name, func(t *testing.T) {
			objects := slices.Concat(controltest.NodeWith("good", "", controltest.L4(0)), controltest.NodeWith("other", "", controltest.L4(0), controltest.L4(1)),
				[]client.Object{controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()})})
			if other, ok := objects[3].(*v1alpha1.GPUInventory); ok && tc.node != nil {
				tc.node(&other.Status)
			}
			f := newFleet(t, publish.SplitCounters, objects...)
			if tc.hidden {
				f.hidden = []string{"other"}
			}
			got := f.statuses(t)["p"]
			applied := condition(got, v1alpha1.ConditionApplied)
			switch {
			case !tc.hidden:
				if got.GPUs != 3 || got.Nodes != 2 || applied.Status != metav1.ConditionTrue {
					t.Errorf("got %+v", got)
				}
			case got.GPUs != 1 || got.Nodes != 1 || applied.Status != metav1.ConditionFalse || applied.Reason != v1alpha1.ReasonNotPublished,
				!strings.Contains(applied.Message, "On 2 GPUs: "), !strings.Contains(applied.Message, tc.message):
				t.Errorf("got %+v", got)
			}
		})
	}
}
