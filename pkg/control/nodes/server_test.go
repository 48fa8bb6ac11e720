package nodes

import (
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/control/server"
	"github.com/tessera-dra/tessera/pkg/control/undone"
)

func told(c <-chan event.GenericEvent) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// The server was upgraded under a controller that lays pools out as the old one
// wanted them: the new one refuses that.
func TestARefusedPoolIsLaidOutAnew(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.JointCounters
	s.cuttable()
	s.mustReconcile()
	s.publishAfterAnswer()

	s.server.Form = publish.SplitCounters
	s.clock.Step(server.ProbePause)
	s.store.broken = apierrors.NewInvalid(kind(), "n-000", nil)
	changes := s.nodes.Server.Changes()
	s.sharing("only", controltest.Partitioned("1g.10gb")) // something has to be written
	if err := s.reconcile(); !apierrors.IsInvalid(err) {
		t.Fatalf("got %v, want the server's refusal", err)
	}
	if !told(changes) {
		t.Error("the nodes were not told")
	}
	s.store.broken = nil
	s.clock.Step(undone.MaxRetryDelay)
	s.publish()
	s.mustHave(2)
}

// TestRefusedProbesKeepWhatIsPublished: an admission policy refuses the dry runs by which the
// controller finds out what the server stores. The published slices, with counters and shares,
// show it: neither a restart of the controller nor a patch release of the server withdraws them.
func TestRefusedProbesKeepWhatIsPublished(t *testing.T) {
	for name, tc := range map[string]struct {
		plan    v1alpha1.Plan
		offered []string
	}{
		"partitions":     {controltest.Partitioned("3g.40gb"), []string{"", "-mig-3g40gb-0", "-mig-3g40gb-4"}},
		"shares by size": {controltest.BySize(), []string{"", "-mps"}},
	} {
		for event, happens := range map[string]func(*fixture){
			"restart":       func(s *fixture) { s.restart(); s.mustReconcile() },
			"patch release": func(s *fixture) { s.becomes(s.server.Form, "v1.36.4") },
			"both":          func(s *fixture) { s.becomes(s.server.Form, "v1.36.4"); s.restart(); s.mustReconcile() },
			"upgrade":       func(s *fixture) { s.becomes(s.server.Form, "v1.37.1") },
			// The version, too, may not be read any more.
			"unknown version": func(s *fixture) { s.becomes(s.server.Form, controltest.NoVersion) },
		} {
			t.Run(name+", "+event, func(t *testing.T) {
				s := counting(t, tc.plan, tc.offered...)
				writes := s.store.writes
				s.server.Doubt = "A policy refuses the question."
				happens(s)
				s.mustReconcile()
				s.mustOffer(tc.offered...)
				if n := s.store.writes - writes; n > 0 {
					t.Errorf("%d writes, want none", n)
				}
			})
		}
	}
}

// TestRefusedProbesBeforeTheCacheIsFilled: as long as it isn't known what is published, nothing
// is decided.
func TestRefusedProbesBeforeTheCacheIsFilled(t *testing.T) {
	s := counting(t, controltest.Partitioned("3g.40gb"), "", "-mig-3g40gb-0", "-mig-3g40gb-4")
	s.server.Doubt = "A policy refuses the question."
	s.unfilled = errors.New("not filled")
	s.restart()
	if err := s.reconcile(); !errors.Is(err, s.unfilled) {
		t.Errorf("got %v, want %v", err, s.unfilled)
	}
	s.unfilled = nil
	s.clock.Step(2 * server.ProbePause)
	s.mustReconcile()
	s.mustOffer("", "-mig-3g40gb-0", "-mig-3g40gb-4")
}
