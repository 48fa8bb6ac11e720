package policies

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestWithheldGPUs checks that a policy names the selected GPUs that can't be
// allocated, and isn't applied as long as there are any.
func TestWithheldGPUs(t *testing.T) {
	lost := func(g v1alpha1.GPU) v1alpha1.GPU {
		g.Conditions = []v1alpha1.GPUCondition{{Type: string(gpu.Lost), Message: "it fell off the bus"}}
		return g
	}
	unidentified := lost(v1alpha1.GPU{UUID: "GPU-00000002-0000-0000-0000-000000000000", Index: 2})
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.L4(0), lost(controltest.L4(1)), unidentified, lost(controltest.H100(3))),
		controltest.Policy("l4", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive(), GPUSelector: `device.attributes["gpu.nvidia.com"].productName == "NVIDIA L4"`}))...)
	got := f.statuses(t)["l4"]
	applied := meta.FindStatusCondition(got.Conditions, v1alpha1.ConditionApplied)
	want := "1 selected GPU can't be used by new claims as planned; the first is gpu-00000001 of node n (Lost: it fell off the bus)."
	if applied.Status != metav1.ConditionFalse || applied.Reason != v1alpha1.ReasonWithheld || applied.Message != want {
		t.Errorf("got %+v", applied)
	}
	if diff := cmp.Diff([]v1alpha1.WithheldGPU{{Node: "n", GPU: "gpu-00000001", Message: "Lost: it fell off the bus"}}, got.Withheld); diff != "" {
		t.Errorf("status.withheld (-want +got):\n%s", diff)
	}
	if got.GPUs != 1 || got.WithheldGPUs != 1 || len(got.Problems) > 0 {
		t.Errorf("%d GPUs, %d withheld, problems %v", got.GPUs, got.WithheldGPUs, got.Problems)
	}
}

// TestWithheldParts checks that a policy names GPUs of which new claims don't get all that it
// plans, and only these.
func TestWithheldParts(t *testing.T) {
	fails := controltest.L4(0)
	fails.Conditions = []v1alpha1.GPUCondition{{Type: string(gpu.MPSDaemonFailed), Message: "no server"}}
	for name, tc := range map[string]struct {
		plan v1alpha1.Plan
		want []v1alpha1.WithheldGPU
	}{
		"shares": {v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: new(int32(2))}}, []v1alpha1.WithheldGPU{{Node: "n", GPU: "gpu-00000000", Message: "MPSDaemonFailed: no server"}}},
		"whole":  {controltest.Exclusive(), nil},
	} {
		f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", fails), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: tc.plan}))...)
		if diff := cmp.Diff(tc.want, f.statuses(t)["p"].Withheld); diff != "" {
			t.Errorf("%s: status.withheld (-want +got):\n%s", name, diff)
		}
	}
}

// TestWithheldWhileTriedAgain: a policy's status isn't written when the pause after a refusal
// ends, and names the GPU until a claim has been given the device.
func TestWithheldWhileTriedAgain(t *testing.T) {
	refuses := controltest.L4(0)
	refuses.Conditions = []v1alpha1.GPUCondition{{
		Type: string(gpu.PrepareFailed), Message: "no device node", Refused: []string{"gpu-00000000"}, RetryAt: new(metav1.Unix(1060, 0)),
	}}
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", refuses), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	f.server.Taints = true
	want := f.statuses(t)["p"]
	if diff := cmp.Diff([]v1alpha1.WithheldGPU{{Node: "n", GPU: "gpu-00000000", Message: "PrepareFailed: no device node"}}, want.Withheld); diff != "" {
		t.Errorf("status.withheld (-want +got):\n%s", diff)
	}
	f.clock.Step(time.Minute)
	if diff := cmp.Diff(want, f.statuses(t)["p"]); diff != "" {
		t.Errorf("the status when the pause has ended (-before +now):\n%s", diff)
	}
}

// TestWithheldGPUsAreBounded checks that a status doesn't grow with the number of
// broken GPUs, nor with their messages.
func TestWithheldGPUsAreBounded(t *testing.T) {
	var gpus []v1alpha1.GPU
	for i := range 20 {
		g := controltest.L4(i)
		g.Conditions = []v1alpha1.GPUCondition{{Type: string(gpu.Unreadable), Message: strings.Repeat("x", 1000)}}
		gpus = append(gpus, g)
	}
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", gpus...), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	got := f.statuses(t)["p"]
	if got.WithheldGPUs != 20 || len(got.Withheld) != v1alpha1.MaxWithheldGPUs || len([]rune(got.Withheld[0].Message)) != maxWithheldMessage {
		t.Errorf("%d GPUs, %d listed, the first with %d characters", got.WithheldGPUs, len(got.Withheld), len(got.Withheld[0].Message))
	}
	if c := meta.FindStatusCondition(got.Conditions, v1alpha1.ConditionApplied); c.Reason != v1alpha1.ReasonWithheld {
		t.Errorf("got %+v", c)
	}
}

// TestGPUOfWhichNothingCanBeOffered checks that the status says why, and
// doesn't mention ResourceSlices that must not be written.
func TestGPUOfWhichNothingCanBeOffered(t *testing.T) {
	f := newFleet(t, publish.SplitCounters, append(controltest.NodeWith("n", "", controltest.H100(0)), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Exclusive()}))...)
	f.claims.Have("n", controltest.Devices{"ns/c": {"gpu-00000000-mig-2g20gb-0"}}) // the tables list no such partition
	got := f.statuses(t)["p"]
	applied := meta.FindStatusCondition(got.Conditions, v1alpha1.ConditionApplied)
	if applied.Status != metav1.ConditionFalse || applied.Reason != v1alpha1.ReasonProblems || !strings.Contains(applied.Message, "don't list gpu-00000000-mig-2g20gb-0") {
		t.Errorf("got %+v", applied)
	}
	if got.GPUs != 0 || len(got.Served) > 0 {
		t.Errorf("%d GPUs are offered: %v", got.GPUs, got.Served)
	}
}
