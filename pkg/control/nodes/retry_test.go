package nodes

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
)

// TestFailuresAreRetriedSeldom: a node that fails each time is tried and logged a few times a
// minute, although what was written before the failure wakes the controller.
func TestFailuresAreRetriedSeldom(t *testing.T) {
	for name, prepare := range map[string]func(*fixture) reconcile.Reconciler{
		"slices can't be written": func(s *fixture) reconcile.Reconciler {
			s.server.Form = publish.SplitCounters
			s.cuttable()
			s.mustReconcile()
			s.pluginAnswers()
			s.store.broken = controltest.ErrFull
			return s.nodes
		},
		"slices can't be deleted": func(s *fixture) reconcile.Reconciler {
			s.published()
			s.store.stuck = controltest.ErrFull
			s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.RegisteredAt = nil })
			return s.nodes
		},
		"another driver's slices come back": func(s *fixture) reconcile.Reconciler {
			s.store.rewrites = true
			s.store.foreign = append(s.store.foreign, foreignSlice())
			return reconcile.Func(func(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
				if inv := s.inventory(); inv.Status.PublishResponse != inv.Spec.PublishRequest {
					s.pluginAnswers()
				}
				return s.nodes.Reconcile(ctx, r)
			})
		},
		"the plugin can't be asked": func(s *fixture) reconcile.Reconciler {
			s.nodes.Client = controltest.FailingWrites(s.api)
			return s.nodes
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			controltest.Queue{Reconciler: prepare(s), Clock: s.clock, State: func() string {
				state := s.inventory().ResourceVersion
				for _, slice := range slices.Concat(s.store.slices, s.store.foreign) {
					state += fmt.Sprint(" ", slice.Name, slice.Spec.Pool.Generation)
				}
				return state
			}}.MustBeSlow(t, "n")
		})
	}
}
