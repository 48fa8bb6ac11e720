package control

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// twiceFixture is a node whose GPUs are offered whole and in shares by size.
func twiceFixture(t *testing.T) *fixture {
	t.Helper()
	s := newFixture(t)
	s.server.form, s.server.multiple, s.server.charged, s.server.version = publish.SplitCounters, true, true, "v1.36.3"
	s.cuttable()
	s.sharing("p", v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}})
	s.mustReconcile()
	s.pluginAnswers()
	s.mustReconcile()
	s.mustOffer("", "-mps")
	return s
}

// refuse has the node's plugin report a double allocation.
func (s *fixture) refuse(version string) {
	s.t.Helper()
	inv := s.inventory()
	inv.Status.AllocatedTwice = &v1alpha1.DoubleAllocation{
		Devices: []string{"gpu-00000000", "gpu-00000000-mps"}, Claims: []string{"ns/whole", "ns/share"}, Kubernetes: version, RefusedAt: metav1.Now(),
	}
	if err := s.api.Status().Update(s.t.Context(), inv); err != nil {
		s.t.Fatal(err)
	}
}

// reconciled runs the reconciliations that follow from a change.
func (s *fixture) reconciled() {
	s.t.Helper()
	s.mustReconcile()
	s.mustReconcile()
}

// TestOlderScheduler: one double allocation ends the combination, through a restart
// of the controller and until the server is upgraded.
func TestOlderScheduler(t *testing.T) {
	s := twiceFixture(t)
	recorded := events.NewFakeRecorder(10)
	s.nodes.events = recorded
	s.refuse("v1.36.3")
	s.reconciled()
	s.mustOffer("-mps")
	if len(recorded.Events) != 1 {
		t.Fatalf("%d events, want one", len(recorded.Events))
	}
	if e := <-recorded.Events; !strings.Contains(e, "Warning AllocatedTwice") || !strings.Contains(e, "ns/whole and ns/share") {
		t.Errorf("event %q", e)
	}
	account, err := s.nodes.planner.accountOf(t.Context(), s.inventory())
	if err != nil {
		t.Fatal(err)
	}
	if told := strings.Join(account.problems(), " "); !strings.Contains(told, "on node n it allocated the same part of a GPU to two claims") || !account.gpus[0].uncharged {
		t.Errorf("problems %q, uncharged %v", told, account.gpus[0].uncharged)
	}

	s.restart()
	s.mustReconcile()
	s.mustOffer("-mps")

	s.server.version = "v1.37.1"
	s.clock.Step(2 * probePause)
	if err := s.nodes.planner.server.probeAgain(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.mustReconcile()
	s.mustOffer("", "-mps")
}

// TestDoubleAllocationIsRemoved: an administrator says that the scheduler was upgraded.
func TestDoubleAllocationIsRemoved(t *testing.T) {
	s := twiceFixture(t)
	s.refuse("v1.36.3")
	s.reconciled()
	s.mustOffer("-mps")
	before := s.inventory()
	after := before.DeepCopy()
	after.Status.AllocatedTwice = nil
	if err := s.api.Status().Patch(t.Context(), after, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	s.reconciled()
	s.mustOffer("", "-mps")
}

// TestPlanThatExplainsDoubleAllocation: the scheduler allocated by slices that were
// just replaced. That isn't its fault.
func TestPlanThatExplainsDoubleAllocation(t *testing.T) {
	s := twiceFixture(t)
	s.sharing("p", exclusive())
	s.mustReconcile()
	s.refuse("v1.36.3")
	s.reconciled()
	if d := s.inventory().Status.AllocatedTwice; d != nil {
		t.Errorf("it is still there: %+v", d)
	}
	s.sharing("p", v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}})
	s.mustReconcile()
	s.mustOffer("", "-mps")
}
