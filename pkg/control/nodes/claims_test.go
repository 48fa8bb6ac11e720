package nodes

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// leavingClaims are gone when they are asked for again.
type leavingClaims struct {
	cache.SharedIndexInformer
}

func (i leavingClaims) GetIndexer() cache.Indexer {
	return leavingIndexer{i.SharedIndexInformer.GetIndexer()}
}

type leavingIndexer struct{ cache.Indexer }

func (i leavingIndexer) ByIndex(name, value string) ([]any, error) {
	now, err := i.Indexer.ByIndex(name, value)
	if err != nil {
		return nil, err
	}
	return now, i.Replace(nil, "")
}

// A claim that is deleted during the decision about its node triggers no
// reconciliation, because nothing waited for it yet: the node must be decided
// again.
func TestClaimThatGoesWhileItIsCounted(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.SplitCounters
	s.cuttable()
	s.sharing("p", controltest.Exclusive())
	s.claims.Have("n", controltest.Devices{"ns/c": {"gpu-00000000-mig-3g40gb-4"}})
	s.claims.Informer = leavingClaims{s.claims.Informer}
	d, err := s.decide(s.inventory())
	if err != nil {
		t.Fatal(err)
	}
	if len(d.GPUs[0].Leftover) > 0 || s.nodes.Planner.DependsOnClaims("n") {
		t.Errorf("waits for a claim that is gone: %v", d.GPUs[0].Leftover)
	}
}

func TestWhichClaimsConcernANode(t *testing.T) {
	s := newFixture(t)
	s.server.Form = publish.SplitCounters
	s.cuttable()
	s.publish()
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  int
	}{
		"nothing given":            {&resourceapi.ResourceClaim{}, 0},
		"a device that is offered": {controltest.Claim("n", "gpu-00000000"), 0},
		"one that isn't any more":  {controltest.Claim("n", "gpu-00000000-mig-1g10gb-9"), 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := s.nodes.OfClaim(tc.claim); len(got) != tc.want {
				t.Errorf("got %v, want %d", got, tc.want)
			}
		})
	}
	s.claims.Have("n", controltest.Devices{"ns/c": {"gpu-00000001-mig-3g40gb-4"}})
	s.sharing("p", controltest.Exclusive())
	s.mustReconcile()
	if got := s.nodes.OfClaim(controltest.Claim("n", "gpu-00000000")); len(got) != 1 {
		t.Error("while something waits, every claim of the node concerns it")
	}
}

// TestClaimsConcernASickNode checks that claims concern a node with a device that new claims
// must not get: they show whether the scheduler heeds taints, and how long a device of a
// claim must stay published.
func TestClaimsConcernASickNode(t *testing.T) {
	shares := v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: new(int32(2))}}
	noWhole := v1alpha1.HealthPolicy{RowRemapPending: v1alpha1.NoSchedule}
	for name, tc := range map[string]struct {
		condition gpu.ConditionType
		plan      v1alpha1.Plan
		health    v1alpha1.HealthPolicy
		want      int
	}{
		"lost":                           {gpu.Lost, controltest.Exclusive(), v1alpha1.HealthPolicy{}, 1},
		"a link is down":                 {gpu.NVLinkDown, controltest.Exclusive(), v1alpha1.HealthPolicy{}, 0},
		"MPS fails":                      {gpu.MPSDaemonFailed, shares, v1alpha1.HealthPolicy{}, 1},
		"MPS fails, and nobody gets any": {gpu.MPSDaemonFailed, controltest.Exclusive(), v1alpha1.HealthPolicy{}, 0},
		"rows wait":                      {gpu.RowRemapPending, controltest.Exclusive(), v1alpha1.HealthPolicy{}, 0},
		"rows wait, by policy":           {gpu.RowRemapPending, controltest.Exclusive(), noWhole, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.server.Form = publish.SplitCounters
			sick := controltest.H100(0)
			sick.Conditions = []v1alpha1.GPUCondition{{Type: string(tc.condition)}}
			s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.GPUs = []v1alpha1.GPU{sick, controltest.H100(1)} })
			if err := s.api.Create(t.Context(), controltest.Policy("p", v1alpha1.SharingPolicySpec{Plan: tc.plan, Health: tc.health})); err != nil {
				t.Fatal(err)
			}
			s.publish()
			offered := s.store.slices[len(s.store.slices)-1].Spec.Devices[0].Name
			if got := s.nodes.OfClaim(controltest.Claim("n", offered)); len(got) != tc.want {
				t.Errorf("got %v, want %d", got, tc.want)
			}
		})
	}
}
