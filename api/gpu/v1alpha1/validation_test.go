package v1alpha1

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestValidate(t *testing.T) {
	for name, tc := range map[string]struct {
		spec SharingPolicySpec
		want []string // "field: kind"
	}{
		"exclusive":       {spec: SharingPolicySpec{Plan: Plan{Exclusive: &ExclusivePlan{}}}},
		"partitioned":     {spec: SharingPolicySpec{Plan: Plan{Partitioned: &PartitionedPlan{Profiles: []string{"1g.10gb", "1g.10gb+me"}, KeepWarm: &metav1.Duration{Duration: time.Minute}, MPS: &PartitionMPS{Shares: 4}}}}},
		"equal shares":    {spec: SharingPolicySpec{Plan: Plan{MPS: &MPSPlan{Shares: ptr.To[int32](4)}}}},
		"consumable":      {spec: SharingPolicySpec{Plan: Plan{MPS: &MPSPlan{Consumable: &ConsumableMPS{}}}}},
		"time-sliced":     {spec: SharingPolicySpec{Plan: Plan{TimeSliced: &TimeSlicedPlan{Replicas: 4}}}},
		"no plan":         {spec: SharingPolicySpec{}, want: []string{"spec.plan: FieldValueRequired"}},
		"two plans":       {spec: SharingPolicySpec{Plan: Plan{Exclusive: &ExclusivePlan{}, TimeSliced: &TimeSlicedPlan{Replicas: 2}}}, want: []string{"spec.plan: FieldValueForbidden"}},
		"bad node label":  {spec: SharingPolicySpec{NodeSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a b": ""}}, Plan: Plan{Exclusive: &ExclusivePlan{}}}, want: []string{"spec.nodeSelector.matchLabels: FieldValueInvalid"}},
		"no profile":      {spec: SharingPolicySpec{Plan: Plan{Partitioned: &PartitionedPlan{Profiles: []string{"1g.10gb", "small"}}}}, want: []string{"spec.plan.partitioned.profiles[1]: FieldValueInvalid"}},
		"all suffixes":    {spec: SharingPolicySpec{Plan: Plan{Partitioned: &PartitionedPlan{Profiles: []string{"1g.24gb+me.all", "1g.24gb-me", "1g.24gb+gfx", "1g.24gb+me", "4g.96gb+gfx", "7g.141gb"}}}}},
		"odd profiles":    {spec: SharingPolicySpec{Plan: Plan{Partitioned: &PartitionedPlan{Layout: []string{"1g.24gb+", "1g.24gb me", "1c.3g.40gb", "1g.24GB", ""}}}}, want: []string{"spec.plan.partitioned.layout[0]: FieldValueInvalid", "spec.plan.partitioned.layout[1]: FieldValueInvalid", "spec.plan.partitioned.layout[2]: FieldValueInvalid", "spec.plan.partitioned.layout[3]: FieldValueInvalid", "spec.plan.partitioned.layout[4]: FieldValueInvalid"}},
		"twice":           {spec: SharingPolicySpec{Plan: Plan{Partitioned: &PartitionedPlan{Profiles: []string{"1g.10gb", "1g.10gb"}}}}, want: []string{"spec.plan.partitioned.profiles[1]: FieldValueDuplicate"}},
		"both cuts":       {spec: SharingPolicySpec{Plan: Plan{Partitioned: &PartitionedPlan{Profiles: []string{"1g.10gb"}, Layout: []string{"3g.40gb"}}}}, want: []string{"spec.plan.partitioned.layout: FieldValueForbidden"}},
		"negative warmth": {spec: SharingPolicySpec{Plan: Plan{Partitioned: &PartitionedPlan{KeepWarm: &metav1.Duration{Duration: -1}}}}, want: []string{"spec.plan.partitioned.keepWarm: FieldValueInvalid"}},
		"one share":       {spec: SharingPolicySpec{Plan: Plan{Partitioned: &PartitionedPlan{MPS: &PartitionMPS{Shares: 1}}}}, want: []string{"spec.plan.partitioned.mps.shares: FieldValueInvalid"}},
		"empty mps":       {spec: SharingPolicySpec{Plan: Plan{MPS: &MPSPlan{}}}, want: []string{"spec.plan.mps: FieldValueRequired"}},
		"bad consumable":  {spec: SharingPolicySpec{Plan: Plan{MPS: &MPSPlan{Consumable: &ConsumableMPS{MemoryStep: new(resource.MustParse("0")), MaxClients: ptr.To[int32](99)}}}}, want: []string{"spec.plan.mps.consumable.memoryStep: FieldValueInvalid", "spec.plan.mps.consumable.maxClients: FieldValueInvalid"}},
		"bad time slices": {spec: SharingPolicySpec{Plan: Plan{TimeSliced: &TimeSlicedPlan{Replicas: 100, Interval: "Ages"}}}, want: []string{"spec.plan.timeSliced.replicas: FieldValueInvalid", "spec.plan.timeSliced.interval: FieldValueNotSupported"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, e := range tc.spec.Validate() {
				got = append(got, e.Field+": "+string(e.Type))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestSetDefaults(t *testing.T) {
	spec := SharingPolicySpec{Plan: Plan{MPS: &MPSPlan{Consumable: &ConsumableMPS{}}, TimeSliced: &TimeSlicedPlan{}}}
	spec.SetDefaults()
	want := SharingPolicySpec{Plan: Plan{
		MPS:        &MPSPlan{Consumable: &ConsumableMPS{MemoryStep: new(resource.MustParse("1Gi")), MaxClients: ptr.To[int32](16)}},
		TimeSliced: &TimeSlicedPlan{Interval: DefaultTimeSlice},
	}}
	if diff := cmp.Diff(want, spec); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
