package nodes

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

func kind() schema.GroupKind {
	return schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}
}

// cuttable makes the node's GPUs ones that MIG can cut.
func (s *fixture) cuttable() {
	s.t.Helper()
	s.report(func(inv *v1alpha1.GPUInventory) {
		inv.Status.GPUs = []v1alpha1.GPU{controltest.H100(0), controltest.H100(1)}
	})
}

// sharing makes a policy for all GPUs, or changes it.
func (s *fixture) sharing(name string, plan v1alpha1.Plan) {
	s.t.Helper()
	p := controltest.Policy(name, v1alpha1.SharingPolicySpec{Plan: plan})
	old := &v1alpha1.SharingPolicy{}
	if s.api.Get(s.t.Context(), client.ObjectKeyFromObject(p), old) == nil {
		p.Generation = old.Generation + 1
		if err := s.api.Delete(s.t.Context(), old); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := s.api.Create(s.t.Context(), p); err != nil {
		s.t.Fatal(err)
	}
}

// offered lists the names of the first GPU's devices.
func (s *fixture) offered() []string {
	var out []string
	for _, slice := range s.store.slices {
		for _, d := range slice.Spec.Devices {
			if len(d.Name) >= 12 && d.Name[:12] == "gpu-00000000" {
				out = append(out, d.Name[12:])
			}
		}
	}
	slices.Sort(out)
	return out
}

func (s *fixture) mustOffer(want ...string) {
	s.t.Helper()
	if diff := cmp.Diff(want, s.offered()); diff != "" {
		s.t.Fatalf("devices of the first GPU (-want +got):\n%s", diff)
	}
}

// A device that a claim has stays through any change of plan, and no longer.
func TestPlansChangeWithoutWaiting(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.SplitCounters
	s.cuttable()
	s.sharing("p", controltest.Partitioned("3g.40gb"))
	s.publish()
	s.mustOffer("", "-mig-3g40gb-0", "-mig-3g40gb-4")

	s.claims.Have("n", controltest.Devices{"ns/c": {"gpu-00000000-mig-3g40gb-4"}})
	s.mustReconcile()
	s.mustOffer("", "-mig-3g40gb-0", "-mig-3g40gb-4")
	if s.nodes.Planner.DependsOnClaims("n") {
		t.Error("what is planned waits for nobody")
	}
	s.sharing("p", controltest.Exclusive())
	s.mustReconcile()
	s.mustOffer("", "-mig-3g40gb-4")
	if !s.nodes.Planner.DependsOnClaims("n") {
		t.Error("nothing waits for the claim")
	}
	s.claims.Have("n", nil)
	s.mustReconcile()
	s.mustOffer("")
}

// Devices of claims affect the policies' statuses only through waiting devices
// and problems; changes of these trigger an event.
func TestStatusesAreJudgedWhenClaimsChangeThem(t *testing.T) {
	for name, device := range map[string]string{"leftover": "gpu-00000000-mig-3g40gb-4", "not listed any more": "gpu-00000000-mig-2g20gb-0"} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.server.Form = publish.SplitCounters
			s.cuttable()
			s.sharing("p", controltest.Exclusive())
			s.mustReconcile()
			for _, claims := range []controltest.Devices{{"ns/c": {device}}, nil} {
				s.claims.Have("n", claims)
				if s.mustReconcile(); !told(s.nodes.Planner.Changes()) {
					t.Errorf("claims are %v now, and nobody was told", claims)
				}
			}
			if s.mustReconcile(); told(s.nodes.Planner.Changes()) {
				t.Error("nothing changed")
			}
		})
	}
}

// One policy goes, another comes, the node's labels change: the same facts give
// the same devices, without a policy and without a restart.
func TestPlanFollowsTheFacts(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.SplitCounters
	s.cuttable()
	s.publish()
	all := s.offered()
	if len(all) < 1+7+2 {
		t.Fatalf("without a policy %v is offered", all)
	}
	p := controltest.Policy("p", v1alpha1.SharingPolicySpec{
		Plan: controltest.Exclusive(), NodeSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "training"}},
	})
	if err := s.api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	s.mustOffer(all...)
	node := &corev1.Node{}
	if err := s.api.Get(t.Context(), client.ObjectKey{Name: "n"}, node); err != nil {
		t.Fatal(err)
	}
	node.Labels = map[string]string{"pool": "training"}
	if err := s.api.Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	s.mustOffer("")
	if err := s.api.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	s.mustOffer(all...)
}

// Plans depend on labels; while these are unknown, the published slices stay.
func TestUnknownNodeKeepsItsPool(t *testing.T) {
	s := newFixture(t)
	s.published()
	if err := s.api.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}); err != nil {
		t.Fatal(err)
	}
	s.restart()
	s.mustReconcile()
	s.mustHave(1)
	s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.RegisteredAt = nil })
	s.mustReconcile()
	s.mustHave(0)
}

func TestNodeIsToldWhatPoliciesAsk(t *testing.T) {
	s := newFixture(t)
	s.cuttable()
	plan := controltest.Partitioned("3g.40gb")
	plan.Partitioned.KeepWarm = &metav1.Duration{Duration: time.Minute}
	s.sharing("p", plan)
	s.mustReconcile()
	want := []v1alpha1.GPUSpec{{UUID: controltest.H100(0).UUID, KeepWarm: plan.Partitioned.KeepWarm}, {UUID: controltest.H100(1).UUID, KeepWarm: plan.Partitioned.KeepWarm}}
	if diff := cmp.Diff(want, s.inventory().Spec.GPUs); diff != "" {
		t.Errorf("spec.gpus (-want +got):\n%s", diff)
	}
	s.mustHaveAsked(1) // in the same breath
	version := s.inventory().ResourceVersion
	s.mustReconcile()
	if got := s.inventory().ResourceVersion; got != version {
		t.Error("the inventory was written again")
	}
	s.sharing("p", controltest.Partitioned("3g.40gb"))
	s.mustReconcile()
	if got := s.inventory().Spec; len(got.GPUs) > 0 || got.PublishRequest != 1 {
		t.Errorf("spec is %+v", got)
	}
}

// Slices that are right don't hide that the settings are missing.
func TestSettingsAreWrittenAfterAFailure(t *testing.T) {
	s := newFixture(t)
	s.cuttable()
	s.published()
	s.mustReconcile()
	plan := controltest.Partitioned()
	plan.Partitioned.KeepWarm = &metav1.Duration{Duration: time.Minute}
	full := errors.New("the server is full")
	s.nodes.Client = interceptor.NewClient(s.api, interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return full
		},
	})
	s.sharing("p", plan)
	for range 2 {
		if err := s.reconcile(); !errors.Is(err, full) {
			t.Fatalf("got %v, want %v", err, full)
		}
	}
	s.nodes.Client = s.api
	s.mustReconcile()
	if got := s.inventory().Spec.GPUs; len(got) != 2 || got[0].KeepWarm.Duration != time.Minute {
		t.Errorf("spec.gpus is %+v", got)
	}
}

// The plugin must know that it may reset a GPU when the GPU needs that, and a server
// without taints has nothing of it then.
func TestNodeIsToldWhichGPUsItMayReset(t *testing.T) {
	s := newFixture(t)
	p := controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}}, Health: v1alpha1.HealthPolicy{Reset: v1alpha1.ResetWhenIdle}})
	if err := s.api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	want := []v1alpha1.GPUSpec{{UUID: controltest.H100(0).UUID, Reset: v1alpha1.ResetWhenIdle}, {UUID: controltest.H100(1).UUID, Reset: v1alpha1.ResetWhenIdle}}
	for _, conditions := range [][]v1alpha1.GPUCondition{nil, {{Type: string(gpu.ResetRequired)}}} {
		sick := controltest.H100(0)
		sick.Conditions = conditions
		s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.GPUs = []v1alpha1.GPU{sick, controltest.H100(1)} })
		s.mustReconcile()
		if diff := cmp.Diff(want, s.inventory().Spec.GPUs); diff != "" {
			t.Errorf("spec.gpus with %v (-want +got):\n%s", conditions, diff)
		}
	}
}

// The time slice is told as long as claims have replicas, also those of a policy
// that is gone: their pods go on.
func TestNodeIsToldTheTimeSlice(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.SplitCounters
	s.cuttable()
	told := func(want ...v1alpha1.GPUSpec) {
		t.Helper()
		s.mustReconcile()
		if diff := cmp.Diff(want, s.inventory().Spec.GPUs); diff != "" {
			t.Errorf("spec.gpus (-want +got):\n%s", diff)
		}
	}
	first := v1alpha1.GPUSpec{UUID: "GPU-00000000-0000-0000-0000-000000000000", TimeSlice: v1alpha1.LongTimeSlice}
	second := v1alpha1.GPUSpec{UUID: "GPU-00000001-0000-0000-0000-000000000000", TimeSlice: v1alpha1.LongTimeSlice}
	s.sharing("p", v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2, Interval: v1alpha1.LongTimeSlice}})
	told(first, second)
	s.claims.Have("n", controltest.Devices{"ns/c": {"gpu-00000001-ts2-0"}})
	s.sharing("p", controltest.Exclusive())
	told(second)
	s.sharing("p", v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 3, Interval: v1alpha1.ShortTimeSlice}})
	first.TimeSlice, second.TimeSlice = v1alpha1.ShortTimeSlice, v1alpha1.ShortTimeSlice
	told(first, second)
	s.sharing("p", controltest.Exclusive())
	told(second)
	s.claims.Have("n", nil)
	told()
}

// TestSettingsOfStrangeGPUs checks that a GPU whose UUID the list of settings doesn't accept
// keeps no other GPU's settings from the node.
func TestSettingsOfStrangeGPUs(t *testing.T) {
	s := newFixture(t)
	p := controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}}, Health: v1alpha1.HealthPolicy{Reset: v1alpha1.ResetWhenIdle}})
	if err := s.api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	twin, integrated := controltest.H100(0), controltest.H100(2)
	twin.Index, integrated.UUID = 3, "1833c8b5-9aa0-5382-b784-68b7e77eb185"
	s.report(func(inv *v1alpha1.GPUInventory) {
		inv.Status.GPUs = []v1alpha1.GPU{controltest.H100(0), controltest.H100(1), integrated, twin}
	})
	s.mustReconcile()
	want := []v1alpha1.GPUSpec{{UUID: controltest.H100(1).UUID, Reset: v1alpha1.ResetWhenIdle}}
	if diff := cmp.Diff(want, s.inventory().Spec.GPUs); diff != "" {
		t.Errorf("spec.gpus (-want +got):\n%s", diff)
	}
}
