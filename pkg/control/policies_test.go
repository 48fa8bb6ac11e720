package control

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
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

func TestJudge(t *testing.T) {
	nodes := []gpuNode{
		{labels: labels.Set{"pool": "inference"}, gpus: []resourceapi.Device{device("NVIDIA H100"), device("NVIDIA H100"), device("NVIDIA L4")}},
		{labels: labels.Set{"pool": "training"}, gpus: []resourceapi.Device{device("NVIDIA H100")}},
		{labels: labels.Set{"pool": "empty"}},
	}
	inference := &metav1.LabelSelector{MatchLabels: map[string]string{"pool": "inference"}}
	h100 := `device.attributes["gpu.nvidia.com"].productName == "NVIDIA H100"`
	exclusive := v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}}
	for name, tc := range map[string]struct {
		policies []v1alpha1.SharingPolicy
		want     map[string]string
	}{
		"everything": {
			[]v1alpha1.SharingPolicy{sharing("a", v1alpha1.SharingPolicySpec{Plan: exclusive})},
			map[string]string{"a": "Accepted nodes=2 gpus=4"},
		},
		"by node and GPU": {
			[]v1alpha1.SharingPolicy{sharing("a", v1alpha1.SharingPolicySpec{Plan: exclusive, NodeSelector: inference, GPUSelector: h100})},
			map[string]string{"a": "Accepted nodes=1 gpus=2"},
		},
		"priority decides, and the loser hears of it": {
			[]v1alpha1.SharingPolicy{
				sharing("broad", v1alpha1.SharingPolicySpec{Plan: exclusive}),
				sharing("narrow", v1alpha1.SharingPolicySpec{Plan: exclusive, GPUSelector: h100, Priority: 10}),
			},
			map[string]string{"broad": "Accepted nodes=1 gpus=1 lost=narrow:3", "narrow": "Accepted nodes=2 gpus=3"},
		},
		"a plan that can't be carried out takes no GPU": {
			[]v1alpha1.SharingPolicy{
				sharing("a", v1alpha1.SharingPolicySpec{Plan: exclusive}),
				sharing("mig", v1alpha1.SharingPolicySpec{Priority: 10, Plan: v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}}),
			},
			map[string]string{"a": "Accepted nodes=2 gpus=4", "mig": "PlanNotSupported nodes=0 gpus=0"},
		},
		"a malformed policy harms no other": {
			[]v1alpha1.SharingPolicy{
				sharing("a", v1alpha1.SharingPolicySpec{Plan: exclusive}),
				sharing("no-cel", v1alpha1.SharingPolicySpec{Plan: exclusive, GPUSelector: "device.foo("}),
				sharing("no-plan", v1alpha1.SharingPolicySpec{}),
			},
			map[string]string{"a": "Accepted nodes=2 gpus=4", "no-cel": "Invalid nodes=0 gpus=0", "no-plan": "Invalid nodes=0 gpus=0"},
		},
		"a selector that fails selects nothing": {
			[]v1alpha1.SharingPolicy{sharing("a", v1alpha1.SharingPolicySpec{Plan: exclusive, GPUSelector: `device.attributes["gpu.nvidia.com"].nonsense == "x"`})},
			map[string]string{"a": "Accepted nodes=0 gpus=0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 4 {
				rand.Shuffle(len(tc.policies), func(i, j int) { tc.policies[i], tc.policies[j] = tc.policies[j], tc.policies[i] })
				rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
				got := make(map[string]string)
				for name, status := range judge(t.Context(), tc.policies, nodes) {
					got[name] = verdict(status)
				}
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Fatalf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

// What an admin reads must say what is wrong and where.
func TestJudgeExplains(t *testing.T) {
	exclusive := v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}}
	for name, tc := range map[string]struct {
		spec v1alpha1.SharingPolicySpec
		want string
	}{
		"plan":           {v1alpha1.SharingPolicySpec{Plan: v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}}}, "the one plan it can carry out is exclusive"},
		"selector":       {v1alpha1.SharingPolicySpec{Plan: exclusive, GPUSelector: "1 + 1"}, `spec.gpuSelector: Invalid value: "1 + 1": must evaluate to bool`},
		"missing values": {v1alpha1.SharingPolicySpec{Plan: exclusive, GPUSelector: `device.attributes["gpu.nvidia.com"].nonsense == "x"`}, "no such key: nonsense"},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := []gpuNode{{gpus: []resourceapi.Device{device("NVIDIA L4")}}}
			status := judge(t.Context(), []v1alpha1.SharingPolicy{sharing("a", tc.spec)}, nodes)["a"]
			got := meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionAccepted).Message
			if !strings.Contains(got, tc.want) {
				t.Errorf("got  %q\nwant %q in it", got, tc.want)
			}
		})
	}
}

// The order in which nodes are looked at is any: the same facts must not be told
// in other words each time, because each time would be a write.
func TestJudgeSaysTheSameAgain(t *testing.T) {
	spec := v1alpha1.SharingPolicySpec{
		Plan:        v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}},
		GPUSelector: `device.attributes["gpu.nvidia.com"].nonsense == "x"`,
	}
	var nodes []gpuNode
	for _, name := range []string{"gpu-2", "gpu-1", "gpu-3"} {
		d := device("NVIDIA L4")
		d.Name = name
		nodes = append(nodes, gpuNode{gpus: []resourceapi.Device{d}})
	}
	for range 10 {
		rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		status := judge(t.Context(), []v1alpha1.SharingPolicy{sharing("a", spec)}, nodes)["a"]
		got := meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionAccepted).Message
		if !strings.Contains(got, "fails on gpu-1,") {
			t.Fatalf("got %q, want the first device by name in it", got)
		}
	}
}

func sharing(name string, spec v1alpha1.SharingPolicySpec) v1alpha1.SharingPolicy {
	s := v1alpha1.SharingPolicy{Spec: spec}
	s.Name, s.CreationTimestamp = name, metav1.NewTime(time.Unix(1000, 0))
	return s
}

func device(productName string) resourceapi.Device {
	return resourceapi.Device{Name: "gpu", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		"productName": {StringValue: new(productName)},
	}}
}
