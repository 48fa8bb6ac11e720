package nodes

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// refusals is a node of two H100, of which the first refuses devices to claims.
type refusals struct {
	*fixture
	recorded *events.FakeRecorder
	// stuck are the claims that the GPU refuses, whatever other claims come and go.
	stuck controltest.Devices
}

func newRefusals(t *testing.T, onFailure v1alpha1.PrepareFailurePolicy) refusals {
	t.Helper()
	s := newFixture(t)
	s.server.Form, s.server.Taints = publish.SplitCounters, true
	s.cuttable()
	p := controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: controltest.Partitioned("3g.40gb"), Health: v1alpha1.HealthPolicy{OnPrepareFailure: onFailure}})
	if err := s.api.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	recorded := events.NewFakeRecorder(10)
	s.nodes.Events = recorded
	s.publish()
	s.reconciled()
	return refusals{s, recorded, controltest.Devices{"ns/stuck": {"gpu-00000000-mig-3g40gb-0"}}}
}

// reports has the plugin report that GPUs were refused devices until a time from now; with no
// devices, that they aren't any more.
func (s refusals) reports(n int, pause time.Duration, devices ...string) {
	s.t.Helper()
	inv := s.inventory()
	g := &inv.Status.GPUs[n]
	g.Conditions = nil
	if len(devices) > 0 {
		g.Conditions = []v1alpha1.GPUCondition{{
			Type: string(gpu.PrepareFailed), LastTransitionTime: new(metav1.Unix(900, 0)), Refused: devices, RetryAt: new(metav1.NewTime(s.clock.Now().Add(pause))),
		}}
	}
	if err := s.api.Status().Update(s.t.Context(), inv); err != nil {
		s.t.Fatal(err)
	}
}

// waits reconciles, and returns when to do so again.
func (s refusals) waits() time.Duration {
	s.t.Helper()
	r := reconcile.Request{}
	r.Name = "n"
	result, err := s.nodes.Reconcile(s.t.Context(), r)
	if err != nil {
		s.t.Fatal(err)
	}
	return result.RequeueAfter
}

// tainted lists the published devices that the condition PrepareFailed keeps from new claims.
func (s refusals) tainted() string {
	var out []string
	for _, slice := range s.store.slices {
		for _, d := range slice.Spec.Devices {
			for _, x := range d.Taints {
				if x.Value == string(gpu.PrepareFailed) {
					out = append(out, fmt.Sprintf("%s:%s", strings.TrimPrefix(d.Name, "gpu-0000000"), x.Effect))
				}
			}
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// must reconciles a node with many pods, which come and go, and checks what is published, how
// often slices were written, and that the node is reconciled in time.
func (s refusals) must(tainted string, writes int, again time.Duration) {
	s.t.Helper()
	before, inventory := s.store.writes, s.inventory().ResourceVersion
	for i := range 50 {
		if i%3 > 0 { // otherwise nothing has happened to claims
			claims := maps.Clone(s.stuck)
			claims[fmt.Sprintf("ns/c-%d", i)] = []string{"gpu-00000001-mig-3g40gb-4"}
			s.claims.Have("n", claims)
		}
		if got := s.waits(); got != again {
			s.t.Fatalf("the node is reconciled again after %v, want %v", got, again)
		}
		if diff := cmp.Diff(tainted, s.tainted()); diff != "" {
			s.t.Fatalf("taints (-want +got):\n%s", diff)
		}
	}
	if got := s.store.writes - before; got != writes {
		s.t.Errorf("slices were written %d times, want %d", got, writes)
	}
	if s.inventory().ResourceVersion != inventory || len(s.recorded.Events) > 0 {
		s.t.Error("the inventory, or an event, was written")
	}
}

const (
	allOfHalf = "0-mig-3g40gb-0:NoSchedule 0:NoSchedule"
	othersOf  = "0:NoSchedule"
)

// TestRefusedDeviceIsTriedAgain: in each pause slices are written twice, whatever claims do, and
// nothing else is.
func TestRefusedDeviceIsTriedAgain(t *testing.T) {
	s := newRefusals(t, "")
	for i, minutes := range []time.Duration{1, 2, 4} {
		pause := minutes * time.Minute
		s.reports(0, pause, "gpu-00000000-mig-3g40gb-0")
		s.must(allOfHalf, 1, pause)
		s.clock.Step(pause - time.Second)
		s.must(allOfHalf, 0, time.Second)
		s.clock.Step(time.Second)
		s.must(othersOf, 1, 30*time.Minute)
		s.clock.Step(10 * time.Minute)
		s.must(othersOf, 0, 20*time.Minute)
		if t.Failed() {
			t.Fatalf("in pause %d", i)
		}
	}
	// Nobody claims it. Others want the whole GPU, say.
	s.clock.Step(20 * time.Minute)
	s.must("0-mig-3g40gb-0:NoSchedule", 1, 30*time.Minute)
	s.clock.Step(30 * time.Minute)
	s.must(othersOf, 1, 30*time.Minute)
	s.reports(0, 0)
	s.must("", 1, 0)
}

// TestPodOfRefusedDeviceIsEnded: while its claim is there and when it has gone, the taints are
// the same.
func TestPodOfRefusedDeviceIsEnded(t *testing.T) {
	s := newRefusals(t, v1alpha1.EvictOnPrepareFailure)
	s.reports(0, time.Minute, "gpu-00000000-mig-3g40gb-0")
	const tainted = "0-mig-3g40gb-0:NoExecute 0:NoSchedule"
	s.must(tainted, 1, time.Minute)
	s.stuck = controltest.Devices{}
	s.must(tainted, 0, time.Minute)
	s.clock.Step(time.Minute)
	s.must(othersOf, 1, 30*time.Minute)
	s.stuck = controltest.Devices{"ns/next": {"gpu-00000000-mig-3g40gb-0"}}
	s.must(othersOf, 0, 30*time.Minute)
}

// TestRetriesOfSeveralGPUs: each GPU has a pause of its own, and the node is reconciled at the end
// of the first one, also by a controller that has started since.
func TestRetriesOfSeveralGPUs(t *testing.T) {
	s := newRefusals(t, "")
	s.reports(0, 3*time.Minute, "gpu-00000000-mig-3g40gb-0")
	s.reports(1, time.Minute, "gpu-00000001")
	const ofOther = "1-mig-3g40gb-0:NoSchedule 1-mig-3g40gb-4:NoSchedule"
	s.must(allOfHalf+" "+ofOther+" 1:NoSchedule", 1, time.Minute)
	s.restart()
	s.nodes.Events = s.recorded
	s.must(allOfHalf+" "+ofOther+" 1:NoSchedule", 0, time.Minute)
	s.clock.Step(time.Minute)
	s.restart()
	s.nodes.Events = s.recorded
	s.must(allOfHalf+" "+ofOther, 1, 2*time.Minute)
	s.clock.Step(2 * time.Minute)
	s.must(othersOf+" "+ofOther, 1, 28*time.Minute)
}

// TestRetryIsNoEvidenceAgainstTheScheduler: a claim that got the device while it was offered
// again doesn't show that a scheduler ignores taints, however long it keeps the device.
func TestRetryIsNoEvidenceAgainstTheScheduler(t *testing.T) {
	s := newRefusals(t, "")
	s.reports(0, time.Minute, "gpu-00000000-mig-3g40gb-0")
	s.must(allOfHalf, 1, time.Minute)
	s.clock.Step(time.Minute)
	s.must(othersOf, 1, 30*time.Minute)
	s.clock.Step(20 * time.Minute)
	claim := controltest.Claim("n", "gpu-00000000-mig-3g40gb-0")
	claim.CreationTimestamp = metav1.NewTime(s.clock.Now())
	s.claims.Are(claim)
	for range 3 {
		s.clock.Step(time.Minute)
		s.waits()
	}
	for _, pause := range []time.Duration{2 * time.Minute, 4 * time.Minute, 30 * time.Minute} {
		s.reports(0, pause, "gpu-00000000-mig-3g40gb-0")
		for range 10 {
			s.waits()
			s.clock.Step(pause / 10)
			s.claims.Are(claim)
		}
		s.waits()
	}
	if !s.offers("gpu-00000000-mig-3g40gb-0") || !s.offers("gpu-00000000") || len(s.recorded.Events) > 0 {
		t.Errorf("blocked devices are withdrawn, with %d events: %v", len(s.recorded.Events), s.offered())
	}
	// One that is created while the device is tainted is evidence.
	s.reports(0, 30*time.Minute, "gpu-00000000-mig-3g40gb-0")
	s.waits()
	s.waits()
	s.clock.Step(10 * time.Minute)
	claim.CreationTimestamp = metav1.NewTime(s.clock.Now())
	s.claims.Are(claim)
	s.waits()
	if len(s.recorded.Events) != 1 {
		t.Errorf("%d events after an allocation in spite of the taint", len(s.recorded.Events))
	}
}

// TestRefusedDevicesAreWithdrawn: where taints aren't used, the device that is tried again is
// published again, and the others when that has worked.
func TestRefusedDevicesAreWithdrawn(t *testing.T) {
	s := newRefusals(t, v1alpha1.EvictOnPrepareFailure)
	s.server.Taints = false
	s.clock.Step(server.ProbePause)
	s.mustProbe()
	s.reports(0, time.Minute, "gpu-00000000-mig-3g40gb-0")
	for _, step := range []struct {
		after time.Duration
		want  []string
	}{
		{0, []string{"-mig-3g40gb-4"}},
		{59 * time.Second, []string{"-mig-3g40gb-4"}},
		{time.Second, []string{"-mig-3g40gb-0", "-mig-3g40gb-4"}},
	} {
		s.clock.Step(step.after)
		s.reconciled()
		s.mustOffer(step.want...)
	}
	s.reports(0, 0)
	s.reconciled()
	s.mustOffer("", "-mig-3g40gb-0", "-mig-3g40gb-4")
}
