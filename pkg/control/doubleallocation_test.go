package control

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

func bySize() v1alpha1.Plan {
	return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{}}}
}

func equalShares(n int32) v1alpha1.Plan { return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: &n}} }

// counting is a node whose two GPUs are offered by a plan that needs counters.
func counting(t *testing.T, plan v1alpha1.Plan, offered ...string) *fixture {
	t.Helper()
	s := newFixture(t)
	s.server.form, s.server.multiple, s.server.charged, s.server.version = publish.SplitCounters, true, true, "v1.36.3"
	s.cuttable()
	s.sharing("p", plan)
	s.publish()
	s.mustOffer(offered...)
	return s
}

// refuse has two claims be allocated devices of the second GPU, and the node's plugin
// report that.
func (s *fixture) refuse(holder, refused string) {
	s.t.Helper()
	s.reportDouble(holder, refused)
	s.claims["n"] = []allocation{{gpu.DeviceName(second + holder), "ns/a"}, {gpu.DeviceName(second + refused), "ns/b"}}
}

// second begins the names of the second GPU's devices.
const second = "gpu-00000001"

// reportDouble has the node's plugin report a double allocation.
func (s *fixture) reportDouble(holder, refused string) {
	s.t.Helper()
	inv := s.inventory()
	inv.Status.DoubleAllocation = &v1alpha1.DoubleAllocation{
		Holder:     v1alpha1.AllocatedDevice{Namespace: "ns", Name: "a", UID: "1", Pod: "runs", Device: second + holder},
		Refused:    v1alpha1.AllocatedDevice{Namespace: "ns", Name: "b", UID: "2", Pod: "waits", Device: second + refused},
		Kubernetes: s.server.version, RefusedAt: metav1.Now(),
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

// TestDoubleAllocation: one double allocation withdraws what the scheduler can't be
// trusted with, through a restart of the controller, until the server is upgraded.
func TestDoubleAllocation(t *testing.T) {
	for name, tc := range map[string]struct {
		plan            v1alpha1.Plan
		offered         []string
		holder, refused string
		left            []string
	}{
		"shares by size":         {bySize(), []string{"", "-mps"}, "", "-mps", []string{"-mps"}},
		"equal shares":           {equalShares(2), []string{"", "-mps2-0", "-mps2-1"}, "-mps2-1", "", []string{"-mps2-0", "-mps2-1"}},
		"a partition":            {partitioned("3g.40gb"), []string{"", "-mig-3g40gb-0", "-mig-3g40gb-4"}, "-mig-3g40gb-4", "", []string{""}},
		"overlapping partitions": {partitioned("3g.40gb", "7g.80gb"), []string{"", "-mig-3g40gb-0", "-mig-3g40gb-4", "-mig-7g80gb-0"}, "-mig-3g40gb-0", "-mig-7g80gb-0", []string{""}},
	} {
		t.Run(name, func(t *testing.T) {
			s := counting(t, tc.plan, tc.offered...)
			recorded := events.NewFakeRecorder(10)
			s.nodes.events = recorded
			s.refuse(tc.holder, tc.refused)
			s.reconciled()
			s.mustOffer(tc.left...)
			if len(recorded.Events) != 1 {
				t.Fatalf("%d events, want one", len(recorded.Events))
			}
			if e := <-recorded.Events; !strings.Contains(e, "Warning DoubleAllocation") ||
				!strings.Contains(e, second+tc.holder+" to claim ns/a of pod runs") || !strings.Contains(e, second+tc.refused+" to claim ns/b of pod waits") {
				t.Errorf("event %q", e)
			}
			d, err := s.nodes.planner.forNode(t.Context(), s.inventory())
			if err != nil {
				t.Fatal(err)
			}
			account := d.account
			told := strings.Join(account.problems(), " ")
			for _, want := range []string{"on node n it allocated the same part of a GPU to two claims", "of pod waits", "kubectl patch gpuinventory n "} {
				if !strings.Contains(told, want) || !account.gpus[0].unsafe {
					t.Errorf("problems %q, unsafe %v; want in it %q", told, account.gpus[0].unsafe, want)
				}
			}
			delete(s.claims, "n")
			s.restart()
			s.mustReconcile()
			s.mustOffer(tc.left...)

			s.becomes(publish.SplitCounters, "v1.37.1")
			s.mustOffer(tc.offered...)
		})
	}
}

// becomes has the server be of another version, and the controller find that out.
func (s *fixture) becomes(form publish.Counters, version string) {
	s.t.Helper()
	s.server.form, s.server.version = form, version
	s.clock.Step(2 * probePause)
	if err := s.nodes.planner.server.probeAgain(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	s.mustReconcile()
}

// TestDoubleAllocationWhileServersAlternate: an upgrade of the API servers that goes
// back and forth says nothing about the scheduler.
func TestDoubleAllocationWhileServersAlternate(t *testing.T) {
	s := counting(t, partitioned("3g.40gb"), "", "-mig-3g40gb-0", "-mig-3g40gb-4")
	s.refuse("", "-mig-3g40gb-0")
	s.reconciled()
	delete(s.claims, "n")
	s.becomes(publish.SplitCounters, "v1.36.2")
	for _, version := range []string{"v1.36.3", "v1.36.2", "v1.36.3", "v1.36.2"} {
		s.becomes(publish.SplitCounters, version)
		s.mustOffer("")
	}
}

// TestDoubleAllocationIsRemoved: an administrator says that the scheduler was upgraded.
func TestDoubleAllocationIsRemoved(t *testing.T) {
	s := counting(t, bySize(), "", "-mps")
	s.refuse("", "-mps")
	s.reconciled()
	delete(s.claims, "n")
	s.mustReconcile()
	s.mustOffer("-mps")
	inv := s.inventory()
	inv.Status.DoubleAllocation = nil
	if err := s.api.Status().Update(t.Context(), inv); err != nil {
		t.Fatal(err)
	}
	s.reconciled()
	s.mustOffer("", "-mps")
}

// emptyCache is a cache that has no claims yet; the API server has them.
type emptyCache struct{ fakeClaims }

func (emptyCache) in(string) ([]allocation, error) { return nil, nil }

// TestDoubleAllocationBeforeTheCacheHasTheClaims: the plugin has read both claims from the
// API server, and reports the pair only once.
func TestDoubleAllocationBeforeTheCacheHasTheClaims(t *testing.T) {
	s := counting(t, bySize(), "", "-mps")
	s.nodes.planner.claims = emptyCache{s.claims}
	s.refuse("", "-mps")
	s.reconciled()
	if d := s.inventory().Status.DoubleAllocation; d == nil || !d.Confirmed {
		t.Errorf("got %+v, want it confirmed", d)
	}
	s.mustOffer("-mps")
}

// TestDoubleAllocationThatIsExplained reports double allocations that aren't the scheduler's
// fault: the plan was replaced just now, or the claims have other devices.
func TestDoubleAllocationThatIsExplained(t *testing.T) {
	for name, happens := range map[string]func(*fixture){
		"another plan": func(s *fixture) {
			s.sharing("p", exclusive())
			s.mustReconcile()
			s.refuse("", "-mps")
		},
		"claims that have other devices": func(s *fixture) {
			s.refuse("", "-mps")
			s.claims["n"][1].device = "gpu-00000000-mps"
		},
		"no such claims": func(s *fixture) { s.reportDouble("", "-mps") },
	} {
		t.Run(name, func(t *testing.T) {
			s := counting(t, bySize(), "", "-mps")
			happens(s)
			s.reconciled()
			if d := s.inventory().Status.DoubleAllocation; d != nil {
				t.Errorf("it is still there: %+v", d)
			}
			delete(s.claims, "n")
			s.sharing("p", bySize())
			s.mustReconcile()
			s.mustOffer("", "-mps")
		})
	}
}
