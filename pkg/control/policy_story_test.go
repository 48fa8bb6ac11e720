//go:build integration

package control_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

func TestPolicyIsAnswered(t *testing.T) {
	startController(t)
	n := newNode(t, 2)
	n.report(t)
	n.startPlugin(t)
	p := newPolicy(t, v1alpha1.Plan{Exclusive: &v1alpha1.ExclusivePlan{}})
	p.Spec.GPUSelector = "1 + 1"
	p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/hostname": n.name}}
	if err := api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	answer := func() string {
		if err := api.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
			t.Fatal(err)
		}
		for _, c := range p.Status.Conditions {
			if c.Type == v1alpha1.ConditionAccepted && c.ObservedGeneration == p.Generation {
				return fmt.Sprintf("%s %s nodes=%d gpus=%d", c.Status, c.Reason, p.Status.Nodes, p.Status.GPUs)
			}
		}
		return ""
	}
	eventually(t, "the selector is refused", func() bool { return answer() == "False Invalid nodes=0 gpus=0" })

	change(t, p, func() { p.Spec.GPUSelector = "" })
	eventually(t, "the plan is in force, nowhere yet", func() bool { return answer() == "True Accepted nodes=0 gpus=0" })

	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
		t.Fatal(err)
	}
	object.Labels = map[string]string{"kubernetes.io/hostname": n.name}
	if err := api.Update(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node's label is noticed", func() bool { return answer() == "True Accepted nodes=1 gpus=2" })
	change(t, p, func() { p.Spec.GPUSelector = "1 + 1" })
	eventually(t, "what was accepted stays in force", func() bool { return answer() == "False Invalid nodes=1 gpus=2" })

	p.Status.GPUs = 7
	if err := api.Status().Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a wrong status is corrected", func() bool { return answer() == "False Invalid nodes=1 gpus=2" })
}

// The server itself refuses what makes no sense.
func TestServerRefusesMalformedPolicies(t *testing.T) {
	exclusive := &v1alpha1.ExclusivePlan{}
	for name, plan := range map[string]v1alpha1.Plan{
		"none":             {},
		"two":              {Exclusive: exclusive, TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}},
		"mps without form": {MPS: &v1alpha1.MPSPlan{}},
		"mps in two forms": {MPS: &v1alpha1.MPSPlan{Shares: ptr.To[int32](2), Consumable: &v1alpha1.ConsumableMPS{}}},
		"one replica":      {TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 1}},
		"half a suffix":    {Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.24gb+"}}},
		"twice":            {Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.24gb", "1g.24gb"}}},
		"no profile":       {Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"small"}}},
		"both cuts":        {Partitioned: &v1alpha1.PartitionedPlan{Profiles: []string{"1g.10gb"}, Layout: []string{"1g.10gb"}}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := api.Create(t.Context(), newPolicy(t, plan)); !apierrors.IsInvalid(err) {
				t.Errorf("got %v, want the server to call it invalid", err)
			}
		})
	}
}

// One object that Go can't read would keep the controller from reading any: the
// server must not store it.
func TestServerRefusesWhatCannotBeRead(t *testing.T) {
	partitioned := func(keepWarm any) map[string]any {
		return map[string]any{"plan": map[string]any{"partitioned": map[string]any{"keepWarm": keepWarm}}}
	}
	consumable := func(memoryStep any) map[string]any {
		return map[string]any{"plan": map[string]any{"mps": map[string]any{"consumable": map[string]any{"memoryStep": memoryStep}}}}
	}
	told := func(keepWarm any) map[string]any {
		return map[string]any{"gpus": []any{map[string]any{"uuid": "GPU-1", "keepWarm": keepWarm}}}
	}
	create := func(t *testing.T, kind string, spec map[string]any) (string, error) {
		u := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
		u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
		u.SetGenerateName("odd-")
		err := api.Create(t.Context(), u)
		t.Cleanup(func() { _ = api.Delete(context.Background(), u) })
		return u.GetName(), err
	}
	for _, tc := range []struct {
		kind string
		spec func(any) map[string]any
		bad  []any
		good []any
	}{
		{"SharingPolicy", partitioned, []any{"1 minute", "60", "", "-1s", "9999999999h", int64(60)}, []any{"0", "0s", "1m30s", "1.5h", "250ms"}},
		{"GPUInventory", told, []any{"1 minute", "60", "", "-1s", "9999999999h", int64(60)}, []any{"0s", "1m30s"}},
		{"SharingPolicy", consumable, []any{"1e1.5", "1 Gi", "0", "-1Gi", int64(0)}, []any{"1Gi", "1.5Gi", "1e9", int64(1 << 30)}},
	} {
		for _, value := range tc.bad {
			if _, err := create(t, tc.kind, tc.spec(value)); !apierrors.IsInvalid(err) {
				t.Errorf("%s %v: got %v, want the server to call it invalid", tc.kind, tc.spec(value), err)
			}
		}
		for _, value := range tc.good {
			name, err := create(t, tc.kind, tc.spec(value))
			if err != nil {
				t.Errorf("%s %v: %v", tc.kind, tc.spec(value), err)
				continue
			}
			read := map[string]client.Object{"SharingPolicy": &v1alpha1.SharingPolicy{}, "GPUInventory": &v1alpha1.GPUInventory{}}[tc.kind]
			if err := api.Get(t.Context(), client.ObjectKey{Name: name}, read); err != nil {
				t.Errorf("%s %v: %v", tc.kind, tc.spec(value), err)
			}
		}
	}
}

func TestServerTakesTheProfilesThatThereAre(t *testing.T) {
	all := []string{"1g.5gb", "7g.141gb", "1g.10gb+me", "1g.24gb+me.all", "1g.24gb-me", "2g.48gb+gfx", "4g.96gb"}
	if err := api.Create(t.Context(), newPolicy(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: all}})); err != nil {
		t.Error(err)
	}
	if err := api.Create(t.Context(), newPolicy(t, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: append(all, "1g.5gb")}})); err != nil {
		t.Error(err)
	}
}

// The server sets the same defaults as SetDefaults.
func TestServerDefaults(t *testing.T) {
	for name, plan := range map[string]v1alpha1.Plan{
		"consumable":  {MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}},
		"time-sliced": {TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPolicy(t, plan)
			want := p.Spec.DeepCopy()
			want.SetDefaults()
			if err := api.Create(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(*want, p.Spec); diff != "" {
				t.Errorf("(-ours +the server's):\n%s", diff)
			}
		})
	}
}

func newPolicy(t *testing.T, plan v1alpha1.Plan) *v1alpha1.SharingPolicy {
	t.Helper()
	p := &v1alpha1.SharingPolicy{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "policy-"},
		Spec:       v1alpha1.SharingPolicySpec{Plan: plan},
	}
	t.Cleanup(func() {
		if p.Name != "" {
			_ = api.Delete(context.Background(), p)
		}
	})
	return p
}
