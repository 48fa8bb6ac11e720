package control

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
)

// leavingClaims are gone when they are asked for again.
type leavingClaims struct {
	allocationReader

	all []allocation
}

func (c *leavingClaims) in(string) ([]allocation, error) {
	now := c.all
	c.all = nil
	return now, nil
}

// A claim that is deleted during the decision about its node triggers no
// reconciliation, because nothing waited for it yet: the node must be decided
// again.
func TestClaimThatGoesWhileItIsCounted(t *testing.T) {
	s := newFixture(t)
	s.server.form = publish.SplitCounters
	s.cuttable()
	s.sharing("p", exclusive())
	s.nodes.planner.claims = &leavingClaims{all: []allocation{{"gpu-00000000-mig-3g40gb-4", "ns/c"}}}
	d, err := s.nodes.planner.forNode(t.Context(), s.inventory())
	if err != nil {
		t.Fatal(err)
	}
	if len(d.GPUs[0].Leftover) > 0 || s.nodes.planner.dependsOnClaims("n") {
		t.Errorf("waits for a claim that is gone: %v", d.GPUs[0].Leftover)
	}
}

func TestWhichClaimsConcernANode(t *testing.T) {
	s := newFixture(t)
	s.server.form = publish.SplitCounters
	s.cuttable()
	s.publish()
	for name, tc := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  int
	}{
		"nothing given":            {&resourceapi.ResourceClaim{}, 0},
		"a device that is offered": {given("n", "gpu-00000000"), 0},
		"one that isn't any more":  {given("n", "gpu-00000000-mig-1g10gb-9"), 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := s.nodes.concerned(tc.claim); len(got) != tc.want {
				t.Errorf("got %v, want %d", got, tc.want)
			}
		})
	}
	s.claims["n"] = []allocation{{"gpu-00000001-mig-3g40gb-4", "ns/c"}}
	s.sharing("p", exclusive())
	s.mustReconcile()
	if got := s.nodes.concerned(given("n", "gpu-00000000")); len(got) != 1 {
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
		"lost":                           {gpu.Lost, exclusive(), v1alpha1.HealthPolicy{}, 1},
		"a link is down":                 {gpu.NVLinkDown, exclusive(), v1alpha1.HealthPolicy{}, 0},
		"MPS fails":                      {gpu.MPSDaemonFailed, shares, v1alpha1.HealthPolicy{}, 1},
		"MPS fails, and nobody gets any": {gpu.MPSDaemonFailed, exclusive(), v1alpha1.HealthPolicy{}, 0},
		"rows wait":                      {gpu.RowRemapPending, exclusive(), v1alpha1.HealthPolicy{}, 0},
		"rows wait, by policy":           {gpu.RowRemapPending, exclusive(), noWhole, 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.server.form = publish.SplitCounters
			sick := h100(0)
			sick.Conditions = []v1alpha1.GPUCondition{{Type: string(tc.condition)}}
			s.report(func(inv *v1alpha1.GPUInventory) { inv.Status.GPUs = []v1alpha1.GPU{sick, h100(1)} })
			if err := s.api.Create(t.Context(), sharing("p", v1alpha1.SharingPolicySpec{Plan: tc.plan, Health: tc.health})); err != nil {
				t.Fatal(err)
			}
			s.publish()
			offered := s.store.slices[len(s.store.slices)-1].Spec.Devices[0].Name
			if got := s.nodes.concerned(given("n", offered)); len(got) != tc.want {
				t.Errorf("got %v, want %d", got, tc.want)
			}
		})
	}
}

func given(pool string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: pool + "-claim", UID: "u", Annotations: map[string]string{"large": "thing"}}}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Driver: "gpu.nvidia.com", Pool: pool, Device: d, Request: "r"})
	}
	return c
}

// fakeClaimClient is a server in memory.
type fakeClaimClient struct {
	resourceclient.ResourceClaimsGetter
}

func (fakeClaimClient) IsWatchListSemanticsUnSupported() bool { return true }

func TestClaimsKeepWhatIsNeeded(t *testing.T) {
	mixed := given("a", "gpu-1", "gpu-0")
	others := given("a", "theirs").Status.Allocation.Devices.Results[0]
	others.Driver = "other.example.com"
	admin := given("a", "watched").Status.Allocation.Devices.Results[0]
	admin.AdminAccess = new(true)
	mixed.Status.Allocation.Devices.Results = append(mixed.Status.Allocation.Devices.Results, others, admin)
	unallocated := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "waiting"}}

	server := fake.NewClientset(mixed, given("b", "gpu-7"), unallocated)
	c, err := newClaimIndex(fakeClaimClient{server.ResourceV1()})
	if err != nil {
		t.Fatal(err)
	}
	go c.informer.RunWithContext(t.Context())
	if !cache.WaitForCacheSync(t.Context().Done(), c.informer.HasSynced) {
		t.Fatal("the cache isn't filled")
	}
	for pool, want := range map[string][]allocation{
		"a": {{"gpu-0", "ns/a-claim"}, {"gpu-1", "ns/a-claim"}},
		"b": {{"gpu-7", "ns/b-claim"}},
		"c": nil,
	} {
		got, err := c.in(pool)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("pool %s: got %v, %v, want %v", pool, got, err, want)
		}
	}
	for _, obj := range c.informer.GetStore().List() {
		if claim := obj.(*resourceapi.ResourceClaim); claim.Annotations != nil || claim.Name == "waiting" && claim.Status.Allocation != nil {
			t.Errorf("kept %+v", claim)
		}
	}
}
