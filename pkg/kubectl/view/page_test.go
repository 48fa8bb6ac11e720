package view_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/kubectl/view"
)

// TestPage: a GPU's state, and where its uses are drawn.
func TestPage(t *testing.T) {
	const gib = 1 << 30
	room, none := []view.Fit{{Type: "mig", Profile: "1g.10gb", Count: 1}}, []view.Fit{{Type: "mig", Profile: "1g.10gb"}}
	taint := []view.Taint{{Key: "gpu.tessera.dev/health", Effect: "NoSchedule"}}
	at := func(start, size int) *view.Placement { return &view.Placement{Start: start, Size: size} }
	for name, tc := range map[string]struct {
		gpu       view.GPU
		state     view.State
		unhealthy bool
		used      float64
		segments  []view.Segment
	}{
		"free":           {gpu: view.GPU{Offered: true, Fits: room}, state: view.StateFree},
		"watched":        {gpu: view.GPU{Offered: true, Fits: room, Uses: []view.Use{{Type: "gpu", AdminAccess: true}}}, state: view.StateFree},
		"whole":          {gpu: view.GPU{Offered: true, Fits: none, Uses: []view.Use{{Type: "gpu"}}}, state: view.StateFull, used: 1, segments: []view.Segment{{Size: 1, Uses: []int{0}}}},
		"tainted":        {gpu: view.GPU{Offered: true, Fits: none, Taints: taint}, state: view.StateBlocked, unhealthy: true},
		"a part tainted": {gpu: view.GPU{Offered: true, Fits: room, Taints: taint}, state: view.StateFree, unhealthy: true},
		"refuses": {
			gpu:   view.GPU{Offered: true, Fits: none, Conditions: []view.Condition{{Type: "PrepareFailed"}}, Taints: []view.Taint{{Key: "gpu.nvidia.com/unhealthy", Value: "PrepareFailed", Effect: "NoSchedule"}}},
			state: view.StateBlocked, unhealthy: true,
		},
		"refuses a part": {
			gpu:   view.GPU{Offered: true, Fits: room, Conditions: []view.Condition{{Type: "PrepareFailed"}}, Taints: []view.Taint{{Key: "gpu.nvidia.com/unhealthy", Value: "PrepareFailed", Effect: "NoSchedule"}}},
			state: view.StateFree, unhealthy: true,
		},
		"broken":      {gpu: view.GPU{Fits: []view.Fit{}, Conditions: []view.Condition{{Type: "ResetRequired"}}}, state: view.StateBlocked, unhealthy: true},
		"not offered": {gpu: view.GPU{Fits: []view.Fit{}}, state: view.StateWithheld},
		"unknown":     {gpu: view.GPU{Offered: true, Uses: []view.Use{}}, state: view.StateUnknown},
		"others' instance": {
			gpu:   view.GPU{Offered: true, Fits: room, MemorySlices: 8, Instances: []view.Instance{{Placement: view.Placement{Start: 4, Size: 2}}}},
			state: view.StatePartly, used: .25,
		},
		"partitions": {
			gpu:   view.GPU{Offered: true, Fits: room, MemorySlices: 8, Uses: []view.Use{{Type: "mig", Placement: at(0, 2)}, {Type: "mig", Placement: at(4, 4)}}},
			state: view.StatePartly, used: .75, segments: []view.Segment{{Size: .25, Uses: []int{0}}, {Start: .5, Size: .5, Uses: []int{1}}},
		},
		"equal shares of a partition": {
			gpu: view.GPU{Offered: true, Fits: none, MemorySlices: 8, MemoryBytes: 80 * gib, Uses: []view.Use{
				{Type: "mps", Placement: at(4, 4), Count: 2}, {Type: "mps", Placement: at(4, 4), Count: 2, Number: 1},
			}},
			state: view.StateFull, used: .5, segments: []view.Segment{{Start: .5, Size: .25, Uses: []int{0}}, {Start: .75, Size: .25, Uses: []int{1}}},
		},
		"shares by size": {
			gpu:   view.GPU{Offered: true, Fits: room, MemoryBytes: 80 * gib, Uses: []view.Use{{Type: "mps", MemoryBytes: 20 * gib}, {Type: "mps", MemoryBytes: 40 * gib}}},
			state: view.StatePartly, used: .75, segments: []view.Segment{{Size: .25, Uses: []int{0}}, {Start: .25, Size: .5, Uses: []int{1}}},
		},
		"one replica, two claims": {
			gpu:   view.GPU{Offered: true, Fits: room, Uses: []view.Use{{Type: "timeslice", Count: 4}, {Type: "timeslice", Count: 4}}},
			state: view.StatePartly, used: .25, segments: []view.Segment{{Size: .25, Uses: []int{0, 1}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := view.Page(view.Node{Name: "n", GPUs: []view.GPU{tc.gpu}}, "p").GPUs[0]
			if tc.segments == nil {
				tc.segments = []view.Segment{}
			}
			want := view.PageGPU{GPU: tc.gpu, State: tc.state, Unhealthy: tc.unhealthy, Used: tc.used, Segments: tc.segments}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestPool(t *testing.T) {
	n := view.Node{GPUs: []view.GPU{{Model: "T4"}, {Model: "L40S"}, {Model: "T4"}}}
	labels := map[string]string{"cloud.google.com/gke-nodepool": "batch", "zone": "b"}
	for want, keys := range map[string][]string{"batch": view.PoolLabels(), "b": {"zone"}, "L40S + T4": {"rack"}} {
		if got := view.Pool(n, labels, keys); got != want {
			t.Errorf("the pool by %v is %q, want %q", keys, got, want)
		}
	}
}

// TestWaiting: pods that wait for devices, the oldest first, and no others.
func TestWaiting(t *testing.T) {
	pod := func(name string, age time.Duration, edit func(*corev1.Pod)) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-age))}}
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}}
		p.Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no room"},
		}}
		if edit != nil {
			edit(&p)
		}
		return p
	}
	extended := func(p *corev1.Pod) {
		p.Spec.ResourceClaims = nil
		p.Spec.Containers = []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"nvidia.com/gpu": {}, "cpu": {}}}}}
	}
	bound := func(sandbox corev1.ConditionStatus, container string) func(p *corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.NodeName = "n"
			p.Status.Conditions = []corev1.PodCondition{
				{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Unix(1e9, 0))},
				{Type: corev1.PodReadyToStartContainers, Status: sandbox},
			}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: container}}}}
		}
	}
	got := view.Waiting([]corev1.Pod{
		pod("young", time.Minute, nil), pod("old", time.Hour, nil), pod("extended", 2*time.Hour, extended),
		pod("placed", 0, func(p *corev1.Pod) { p.Spec.NodeName = "n" }),
		pod("pulls its image", 0, bound(corev1.ConditionTrue, "ContainerCreating")),
		pod("hangs", 3*time.Hour, bound(corev1.ConditionFalse, "ContainerCreating")), pod("fails", 3*time.Hour, bound(corev1.ConditionTrue, "CreateContainerError")),
		pod("gated", 0, func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "g"}} }),
		pod("no devices", 0, func(p *corev1.Pod) { p.Spec.ResourceClaims = nil }),
		pod("deleted", 0, func(p *corev1.Pod) { p.DeletionTimestamp = &p.CreationTimestamp }),
		pod("running", 0, func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning }),
	})
	at := func(age time.Duration) metav1.Time { return metav1.NewTime(time.Unix(1e9, 0).Add(-age)) }
	want := []view.WaitingPod{
		{Name: "extended", Since: at(2 * time.Hour), Wants: []string{"nvidia.com/gpu"}, Message: "no room"},
		{Name: "old", Since: at(time.Hour), Wants: []string{"gpu"}, Message: "no room"},
		{Name: "young", Since: at(time.Minute), Wants: []string{"gpu"}, Message: "no room"},
		{Name: "fails", Node: "n", Since: at(0), Wants: []string{"gpu"}},
		{Name: "hangs", Node: "n", Since: at(0), Wants: []string{"gpu"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
