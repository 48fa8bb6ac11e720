package nodes

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
)

// counting is a node whose two GPUs are offered by a plan that needs counters.
func counting(t *testing.T, plan v1alpha1.Plan, offered ...string) *fixture {
	t.Helper()
	s := newFixture(t)
	s.server.Form, s.server.Multiple, s.server.Charged, s.server.Version = publish.SplitCounters, true, true, "v1.36.3"
	s.cuttable()
	s.sharing("p", plan)
	s.publish()
	s.mustOffer(offered...)
	return s
}

// refuse reports a double allocation as the node's plugin does that asks an API server of the
// version.
func (s *fixture) refuse(version string) {
	s.t.Helper()
	inv := s.inventory()
	meta.SetStatusCondition(&inv.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionDoubleAllocation, Status: metav1.ConditionTrue, Reason: v1alpha1.DoubleAllocationReason(version),
		Message: "gpu-1 to claim ns/a", LastTransitionTime: metav1.Time{Time: s.clock.Now()},
	})
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

// distrusted returns the status of the node's condition DoubleAllocation.
func (s *fixture) distrusted() metav1.ConditionStatus {
	s.t.Helper()
	return s.condition(v1alpha1.ConditionDoubleAllocation).Status
}

// TestDoubleAllocation: a node that reports a double allocation is offered without
// counters, through a restart of the controller, until the server is upgraded.
func TestDoubleAllocation(t *testing.T) {
	for name, tc := range map[string]struct {
		plan          v1alpha1.Plan
		offered, left []string
	}{
		"shares by size": {controltest.BySize(), []string{"", "-mps"}, []string{"-mps"}},
		"equal shares":   {controltest.MPS(2), []string{"", "-mps2-0", "-mps2-1"}, []string{"-mps2-0", "-mps2-1"}},
		"partitions":     {controltest.Partitioned("3g.40gb"), []string{"", "-mig-3g40gb-0", "-mig-3g40gb-4"}, []string{""}},
		"overlapping partitions": {
			controltest.Partitioned("3g.40gb", "7g.80gb"), []string{"", "-mig-3g40gb-0", "-mig-3g40gb-4", "-mig-7g80gb-0"}, []string{""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := counting(t, tc.plan, tc.offered...)
			s.refuse("v1.36.3")
			s.reconciled()
			s.mustOffer(tc.left...)
			d, err := s.decide(s.inventory())
			if err != nil {
				t.Fatal(err)
			}
			told := strings.Join(d.Account.GPUs[0].Problems, " ")
			for _, want := range []string{"Kubernetes v1.36.3", "condition DoubleAllocation of the node's GPUInventory", "kubectl delete gpuinventory NODE"} {
				if !strings.Contains(told, want) || !d.Account.GPUs[0].Unsafe {
					t.Errorf("problems %q, unsafe %v; want in it %q", told, d.Account.GPUs[0].Unsafe, want)
				}
			}
			if strings.Contains(told, "ns/a") {
				t.Errorf("problems %q have the node's text", told)
			}
			s.restart()
			s.mustReconcile()
			s.mustOffer(tc.left...)

			s.clock.Step(2 * server.Steady)
			s.mustReconcile()
			s.mustOffer(tc.left...)
			s.becomes(publish.SplitCounters, "v1.37.1")
			s.mustOffer(tc.offered...)
			if got := s.distrusted(); got != metav1.ConditionFalse {
				t.Errorf("the condition is %s after the upgrade", got)
			}
			s.becomes(publish.SplitCounters, "v1.36.3")
			s.mustOffer(tc.offered...)
		})
	}
}

// TestDoubleAllocationOfOneNode: whatever a node reports, all other nodes are offered as
// before.
func TestDoubleAllocationOfOneNode(t *testing.T) {
	s := counting(t, controltest.Partitioned("3g.40gb"), "", "-mig-3g40gb-0", "-mig-3g40gb-4")
	other := s.inventory()
	other.Name, other.OwnerReferences[0].Name, other.ResourceVersion = "m", "m", ""
	if err := s.api.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "m"}}); err != nil {
		t.Fatal(err)
	}
	before, err := s.decide(other)
	if err != nil {
		t.Fatal(err)
	}
	s.refuse("v1.36.3")
	s.reconciled()
	s.mustOffer("")
	after, err := s.decide(other)
	if err != nil {
		t.Fatal(err)
	}
	if after.Account.Pool != before.Account.Pool || len(after.Account.GPUs[0].Problems) > 0 {
		t.Errorf("the other node is offered differently, problems %q", after.Account.GPUs[0].Problems)
	}
}

// becomes has the server be of another version, and the controller find that out.
func (s *fixture) becomes(form publish.Counters, version string) {
	s.t.Helper()
	s.server.Form, s.server.Version = form, version
	s.clock.Step(2 * server.ProbePause)
	if err := s.nodes.Server.ProbeAgain(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	s.reconciled()
}

// TestDoubleAllocationWhileServersAlternate: an upgrade of the API servers that goes
// back and forth says nothing about the scheduler.
func TestDoubleAllocationWhileServersAlternate(t *testing.T) {
	s := counting(t, controltest.Partitioned("3g.40gb"), "", "-mig-3g40gb-0", "-mig-3g40gb-4")
	s.refuse("v1.36.3")
	s.reconciled()
	s.becomes(publish.SplitCounters, "v1.36.2")
	for _, version := range []string{"v1.36.3", "v1.36.2", "v1.36.3", "v1.36.2"} {
		s.becomes(publish.SplitCounters, version)
		s.mustOffer("")
	}
}

// TestDoubleAllocationOnANewerServer: while a control plane is upgraded, the plugin may have
// asked a server that the controller hasn't seen yet.
func TestDoubleAllocationOnANewerServer(t *testing.T) {
	offered := []string{"", "-mig-3g40gb-0", "-mig-3g40gb-4"}
	s := counting(t, controltest.Partitioned("3g.40gb"), offered...)
	s.refuse("v1.37.1")
	s.reconciled()
	s.mustOffer(offered...)
	s.becomes(publish.SplitCounters, "v1.37.1")
	s.mustOffer("")
}

// TestDoubleAllocationIsRemoved: an admin who has upgraded the schedulers alone deletes the
// inventory, and the plugin creates it without the condition.
func TestDoubleAllocationIsRemoved(t *testing.T) {
	s := counting(t, controltest.BySize(), "", "-mps")
	s.refuse("v1.36.3")
	s.reconciled()
	s.mustOffer("-mps")
	s.cuttable()
	s.publish()
	s.mustOffer("", "-mps")
}
