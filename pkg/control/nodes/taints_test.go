package nodes

import (
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestSchedulerThatIgnoresTaints checks that devices of a sick GPU, which are published
// with a taint, are withdrawn after a claim was certainly allocated one of them in spite
// of the taint; and that other claims are no evidence.
func TestSchedulerThatIgnoresTaints(t *testing.T) {
	tainted := time.Unix(1000, 0) // the fixture's time
	for name, tc := range map[string]struct {
		created time.Time
		change  func(*resourceapi.ResourceClaim, *resourceapi.DeviceRequestAllocationResult)
		device  string
		ignored bool
	}{
		"later claim":                 {created: tainted.Add(10 * time.Minute), ignored: true},
		"claim from before the taint": {created: tainted.Add(-time.Second)},
		"claim just after the taint":  {created: tainted.Add(30 * time.Second)},
		"server's clock is ahead":     {created: tainted.Add(-time.Second).Add(5 * time.Minute)},
		"claim of a healthy GPU":      {created: tainted.Add(10 * time.Minute), device: "gpu-00000001"},
		"claim that tolerates it": {created: tainted.Add(10 * time.Minute), change: func(_ *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult) {
			r.Tolerations = []resourceapi.DeviceToleration{{Key: gpu.TaintKey, Operator: resourceapi.DeviceTolerationOpExists}}
		}},
		"claim with another toleration": {created: tainted.Add(10 * time.Minute), ignored: true, change: func(_ *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult) {
			r.Tolerations = []resourceapi.DeviceToleration{{Key: "example.com/other", Operator: resourceapi.DeviceTolerationOpExists}}
		}},
		"claim with admin access": {created: tainted.Add(10 * time.Minute), change: func(_ *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult) {
			r.AdminAccess = new(true)
		}},
		"claim that the scheduler created": {created: tainted.Add(10 * time.Minute), change: func(c *resourceapi.ResourceClaim, _ *resourceapi.DeviceRequestAllocationResult) {
			c.Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.server.Taints = true
			recorded := events.NewFakeRecorder(10)
			s.nodes.Events = recorded
			s.published()
			s.report(func(inv *v1alpha1.GPUInventory) {
				inv.Status.GPUs = []v1alpha1.GPU{controltest.PlainGPU(0, "NVIDIA L4"), controltest.PlainGPU(1, "NVIDIA L4")}
				inv.Status.GPUs[0].Conditions = []v1alpha1.GPUCondition{{Type: string(gpu.ResetRequired), LastTransitionTime: new(metav1.Unix(900, 0))}}
			})
			s.mustReconcile()
			s.mustReconcile()
			s.clock.Step(time.Hour)

			claim := controltest.Claim("n", "gpu-00000000")
			claim.CreationTimestamp = metav1.NewTime(tc.created)
			if tc.device != "" {
				claim.Status.Allocation.Devices.Results[0].Device = tc.device
			}
			if tc.change != nil {
				tc.change(claim, &claim.Status.Allocation.Devices.Results[0])
			}
			s.claims.Are(claim)
			s.mustReconcile()
			s.mustReconcile()
			if got := s.offers("gpu-00000000"); got == tc.ignored {
				t.Errorf("the sick GPU is published: %v", got)
			}
			if !s.offers("gpu-00000001") {
				t.Error("the healthy GPU isn't published")
			}
			if got := len(recorded.Events); tc.ignored != (got == 1) {
				t.Fatalf("%d events", got)
			}
			if !tc.ignored {
				return
			}
			if told := <-recorded.Events; !strings.Contains(told, "gpu-00000000") || !strings.Contains(told, "ns/n-claim") {
				t.Errorf("the event is %q", told)
			}
			s.mustProbe()
			if s.mustReconcile(); s.offers("gpu-00000000") {
				t.Error("the next probe of the server ends the distrust")
			}
			s.clock.Step(server.DistrustTaintsFor)
			s.mustProbe()
			if s.mustReconcile(); !s.offers("gpu-00000000") {
				t.Error("the distrust doesn't end")
			}
			if s.mustReconcile(); !s.offers("gpu-00000000") {
				t.Error("a claim from before the taint was published again is evidence")
			}
		})
	}
}

// TestTaintThatWasAway checks that a node can't make a healthy scheduler look like one that
// ignores taints: it removes a condition until a claim has the device, and sets it again.
func TestTaintThatWasAway(t *testing.T) {
	s := newFixture(t)
	s.server.Taints = true
	s.published()
	s.report(func(inv *v1alpha1.GPUInventory) {
		inv.Status.GPUs = []v1alpha1.GPU{controltest.PlainGPU(0, "NVIDIA L4"), controltest.PlainGPU(1, "NVIDIA L4")}
	})
	reports := func(conditions ...v1alpha1.GPUCondition) {
		t.Helper()
		inv := s.inventory()
		inv.Status.GPUs[0].Conditions = conditions
		if err := s.api.Status().Update(t.Context(), inv); err != nil {
			t.Fatal(err)
		}
		s.reconciled()
		s.clock.Step(time.Hour)
	}
	blocked := v1alpha1.GPUCondition{Type: string(gpu.ResetRequired), LastTransitionTime: new(metav1.Unix(900, 0))}
	mustBeTainted := func() {
		t.Helper()
		for _, d := range s.store.slices[0].Spec.Devices {
			if d.Name == "gpu-00000000" && len(d.Taints) == 1 {
				return
			}
		}
		t.Errorf("gpu-00000000 isn't published with a taint: %+v", s.store.slices[0].Spec.Devices)
	}
	reports(blocked)
	mustBeTainted()
	reports()
	claim := controltest.Claim("n", "gpu-00000000")
	claim.CreationTimestamp = metav1.NewTime(s.clock.Now())
	s.claims.Are(claim)
	reports(blocked)
	s.reconciled()
	mustBeTainted()
}

// offers reports whether a device is published.
func (s *fixture) offers(device string) bool {
	return s.nodes.Slices.Offers("n", gpu.DeviceName(device))
}

// mustProbe has the controller ask the server again.
func (s *fixture) mustProbe() {
	s.t.Helper()
	s.clock.Step(server.ProbePause)
	if err := s.nodes.Server.ProbeAgain(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}
