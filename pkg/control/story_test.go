//go:build integration

package control_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

func TestFirstPublish(t *testing.T) {
	startController(t)
	n := newNode(t, 8)
	n.report(t)
	n.startPlugin(t)
	got := n.waitForPool(t, 8)

	for _, s := range got {
		if s.Spec.NodeName == nil || *s.Spec.NodeName != n.name || s.Spec.Pool.Name != n.name || s.Spec.Pool.Generation != 1 {
			t.Errorf("slice %s: node %v, pool %+v", s.Name, s.Spec.NodeName, s.Spec.Pool)
		}
		want := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.name, UID: n.uid, Controller: new(true)}}
		if diff := cmp.Diff(want, s.OwnerReferences); diff != "" {
			t.Errorf("slice %s: owner (-want +got):\n%s", s.Name, diff)
		}
		for i, d := range s.Spec.Devices {
			if index := d.Attributes["index"].IntValue; index == nil || *index != int64(i) {
				t.Errorf("device %d is of GPU %v", i, index)
			}
		}
	}
	want := []string{"gpu-00000000", "gpu-00000001", "gpu-00000002", "gpu-00000003", "gpu-00000004", "gpu-00000005", "gpu-00000006", "gpu-00000007"}
	if diff := cmp.Diff(want, gpusOf(got)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// The kubelet hasn't registered the plugin: pods would hang.
func TestNothingIsPublishedBeforeRegistration(t *testing.T) {
	startController(t)
	n := newNode(t, 2)
	n.status.RegisteredAt = nil
	n.report(t)
	somethingElseHappens(t)
	n.mustHaveNoSlices(t)
	if r := n.inventory(t).Spec.PublishRequest; r != 0 {
		t.Errorf("a plugin that isn't registered was asked (request %d)", r)
	}
}

func TestRestartWritesNothing(t *testing.T) {
	stop := startController(t)
	n := newNode(t, 8)
	n.report(t)
	n.startPlugin(t)
	before := versions(n.waitForPool(t, 8), n.inventory(t))
	stop()
	startController(t)
	somethingElseHappens(t)
	if diff := cmp.Diff(before, versions(n.pool(t), n.inventory(t))); diff != "" {
		t.Errorf("written on restart (-before +after):\n%s", diff)
	}
	var events corev1.EventList
	if err := api.List(t.Context(), &events); err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Items {
		if e.InvolvedObject.Kind == "Lease" {
			t.Errorf("the event %q was written", e.Message)
		}
	}
}

// The kubelet deletes the slices when it starts, and the plugin runs.
func TestWipedPoolComesBackWithALivingPlugin(t *testing.T) {
	startController(t)
	n := newNode(t, 8)
	n.report(t)
	n.startPlugin(t)
	old := versions(n.waitForPool(t, 8))
	asked := n.inventory(t).Spec.PublishRequest

	begun := time.Now()
	n.wipe(t)
	eventually(t, "the pool is published again", func() bool {
		now := n.pool(t)
		for _, s := range now {
			if _, ok := old[string(s.UID)]; ok {
				return false
			}
		}
		return len(gpusOf(now)) == 8
	})
	t.Logf("back %s after the wipe; %d more requests", time.Since(begun).Round(time.Millisecond), n.inventory(t).Spec.PublishRequest-asked)
}

func TestOneSliceDeletedTakesThePoolAwayUntilThePluginAnswers(t *testing.T) {
	startController(t)
	n := newMIGNode(t, 9)
	n.report(t)
	kill := n.startPlugin(t)
	pool := n.waitForPool(t, 9)
	asked := n.inventory(t).Spec.PublishRequest
	kill()

	if err := slices.Delete(t.Context(), pool[len(pool)-1].Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the rest is withdrawn and the plugin asked", func() bool {
		return len(n.pool(t)) == 0 && n.inventory(t).Spec.PublishRequest > asked
	})
	n.startPlugin(t)
	n.waitForPool(t, 9)
	if got := n.inventory(t).Spec.PublishRequest; got != asked+1 {
		t.Errorf("asked %d times", got-asked)
	}
}

func TestDeadPluginStaysAway(t *testing.T) {
	stop := startController(t)
	n, kill := newPublishedNode(t, 8)
	asked := n.inventory(t).Spec.PublishRequest
	kill()
	n.wipe(t)
	eventually(t, "the plugin is asked", func() bool { return n.inventory(t).Spec.PublishRequest > asked })
	somethingElseHappens(t)
	n.mustHaveNoSlices(t)
	if got := n.inventory(t).Spec.PublishRequest; got != asked+1 {
		t.Errorf("the burst of deletions made %d requests, want 1", got-asked)
	}

	stop()
	startController(t)
	somethingElseHappens(t)
	n.mustHaveNoSlices(t)

	n.startPlugin(t)
	n.waitForPool(t, 8)
}

// The kubelet wipes while no controller runs: the next one must not take an
// old answer for a new one.
func TestWipeDuringControllerDowntime(t *testing.T) {
	stop := startController(t)
	n, kill := newPublishedNode(t, 4)
	stop()
	kill()
	n.wipe(t)
	startController(t)
	somethingElseHappens(t)
	n.mustHaveNoSlices(t)
	n.startPlugin(t)
	n.waitForPool(t, 4)
}

func TestLostGPUGoesAndComesBack(t *testing.T) {
	startController(t)
	n := newNode(t, 8)
	n.report(t)
	n.startPlugin(t)
	n.waitForPool(t, 8)
	asked := n.inventory(t).Spec.PublishRequest

	n.facts.GPUs[2].Conditions = []gpu.Condition{{Type: gpu.Lost, Message: "fell off the bus"}}
	n.report(t)
	const lost = "gpu.nvidia.com/unhealthy=Lost:NoSchedule"
	now := n.waitForTaints(t, map[string]string{"gpu-00000002": lost})
	for _, s := range now {
		if s.Spec.Pool.Generation != 2 {
			t.Errorf("slice %s: generation %d, want 2", s.Name, s.Spec.Pool.Generation)
		}
	}
	n.facts.GPUs[2].Conditions = nil
	n.report(t)
	n.waitForTaints(t, map[string]string{})
	if got := n.inventory(t).Spec.PublishRequest; got != asked {
		t.Errorf("a change of facts asked the plugin %d times", got-asked)
	}
}

// A node whose slices can't be written must not keep others from theirs.
func TestNodesAreIndependent(t *testing.T) {
	startController(t)
	bad, good := newNode(t, 2), newNode(t, 2)
	squatter := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: bad.name + "-000"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "other.example.com", NodeName: new("elsewhere"),
			Pool: resourceapi.ResourcePool{Name: "elsewhere", ResourceSliceCount: 1},
		},
	}
	createSlice(t, squatter)
	bad.report(t)
	bad.startPlugin(t)
	good.report(t)
	good.startPlugin(t)
	good.waitForPool(t, 2)
	if err := slices.Delete(t.Context(), squatter.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	bad.waitForPool(t, 2)
}

// Another driver of the same name keeps its slices on nodes that this one
// doesn't serve.
func TestForeignSlicesAreLeftAlone(t *testing.T) {
	n := newNode(t, 1)
	foreign := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: n.name + "-foreign"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: &n.name,
			Pool: resourceapi.ResourcePool{Name: "theirs", ResourceSliceCount: 1},
		},
	}
	createSlice(t, foreign)
	startController(t)
	somethingElseHappens(t)
	if _, err := slices.Get(t.Context(), foreign.Name, metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
}

func TestInventoryDeletedTakesTheSlicesAlong(t *testing.T) {
	startController(t)
	n, kill := newPublishedNode(t, 3)
	kill()
	if err := api.Delete(t.Context(), n.inventory(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the slices are gone", func() bool { return len(n.pool(t)) == 0 })

	n.report(t) // the plugin creates it again
	n.startPlugin(t)
	n.waitForPool(t, 3)
}

func TestOrphansGoWhenTheControllerStarts(t *testing.T) {
	stop := startController(t)
	n, kill := newPublishedNode(t, 2)
	stop()
	kill()
	if err := api.Delete(t.Context(), n.inventory(t)); err != nil {
		t.Fatal(err)
	}
	startController(t)
	eventually(t, "the slices are gone", func() bool { return len(n.pool(t)) == 0 })
}

// controllerLog returns the log of the controller that was started last.
var controllerLog func() string

// The lease is released, so that the next controller doesn't wait for its
// expiry.
func TestAnotherControllerTakesOver(t *testing.T) {
	stop := startController(t)
	newPublishedNode(t, 2)
	startController(t) // waits
	stop()
	begun := time.Now()
	somethingElseHappens(t)
	t.Logf("the next controller had published a node %s after the last one's end", time.Since(begun).Round(time.Millisecond))
}
