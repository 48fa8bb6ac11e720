package offer_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
	"github.com/tessera-dra/tessera/test/allocators"
)

// scheduler allocates offered and published devices to claims with the
// scheduler's own allocator.
type scheduler struct {
	t       *testing.T
	node    gpu.Node
	options options
	library *allocators.Library
	claims  map[string]*resourceapi.ResourceClaim
}

// newScheduler is for a cluster that has everything, with one 80 GiB GPU.
func newScheduler(t *testing.T, plan v1alpha1.Plan) *scheduler {
	t.Helper()
	s := &scheduler{
		t: t, node: node(t, "h100-80gb", 1), claims: make(map[string]*resourceapi.ResourceClaim), library: allocators.NewLibrary(),
		options: options{Server: offer.Server{Counters: true, Multiple: true, Charged: true}},
	}
	s.node.GPUs[0].MemoryReservedBytes = 616 << 20
	s.plan(plan)
	return s
}

func (s *scheduler) plan(p v1alpha1.Plan) {
	s.options.Plan = p
}

// offered returns the current offer of the first GPU.
func (s *scheduler) offered() offer.GPU { return s.cluster().Offer()[0] }

// cluster returns the cluster with the current options.
func (s *scheduler) cluster() *allocators.Cluster {
	form := publish.NoCounters
	if s.options.Counters {
		form = publish.SplitCounters
	}
	c := &allocators.Cluster{
		Node: s.node, Plans: offertest.OnePlan(s.node, s.options.Plan), Claims: s.claims, Allocator: s.library,
		Server: allocators.Server{Server: s.options.Server, Form: form},
	}
	if !s.options.Charged {
		c.Allocator = uncharged{s.t, s.library}
	}
	c.Publish()
	return c
}

type request = allocators.Request

// asks lets a claim ask, and returns what it has of which devices, "" if it has
// to wait.
func (s *scheduler) asks(name string, requests ...request) string {
	s.t.Helper()
	results, err := s.cluster().Ask(s.t.Context(), name, requests...)
	if err != nil {
		s.t.Fatal(err)
	}
	var out []string
	for _, r := range results {
		out = append(out, strings.TrimPrefix(strings.TrimPrefix(r.Device, firstGPU), "-")+consumed(r))
	}
	return strings.Join(out, " ")
}

// uncharged is the allocator of Kubernetes before 1.36.2, which doesn't charge
// counters for devices that are allocated several times. It is shown none that
// consumes any.
type uncharged struct {
	t *testing.T
	*allocators.Library
}

func (u uncharged) Allocate(ctx context.Context, q allocators.Question) (*resourceapi.AllocationResult, error) {
	for _, s := range q.Slices {
		for _, d := range s.Spec.Devices {
			if d.AllowMultipleAllocations != nil && d.ConsumesCounters != nil {
				u.t.Errorf("%s is allocated several times and consumes counters", d.Name)
			}
		}
	}
	return u.Library.Allocate(ctx, q)
}

func consumed(r resourceapi.DeviceRequestAllocationResult) string {
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r.ConsumedCapacity)) {
		q := r.ConsumedCapacity[name]
		fmt.Fprintf(&out, " %s=%s", name, q.String())
	}
	return out.String()
}

func (s *scheduler) gets(name, want string, requests ...request) {
	s.t.Helper()
	if got := s.asks(name, requests...); got != want {
		s.t.Fatalf("claim %s has %q, want %q; offered: %+v", name, got, want, inShort(s.offered()))
	}
}

func (s *scheduler) waits(name string, requests ...request) {
	s.t.Helper()
	s.gets(name, "", requests...)
}

func (s *scheduler) leaves(names ...string) {
	for _, name := range names {
		delete(s.claims, name)
	}
}

var (
	wholeGPU = request{Kind: "gpu"}
	oneShare = request{Kind: "mps"}
	oneTurn  = request{Kind: "timeslice"}
)

// memory asks for a share of a size, "" for the default one.
func memory(size string, threads ...string) request {
	r := request{Kind: "mps", Capacity: make(map[resourceapi.QualifiedName]string)}
	if size != "" {
		r.Capacity["memory"] = size
	}
	for _, t := range threads {
		r.Capacity["threadPercentage"] = t
	}
	return r
}

func equalShares(n int32) v1alpha1.Plan { return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Shares: &n}} }

func bySize(step string, clients int32) v1alpha1.Plan {
	q := resource.MustParse(step)
	return v1alpha1.Plan{MPS: &v1alpha1.MPSPlan{Consumable: &v1alpha1.ConsumableMPS{MemoryStep: &q, MaxClients: &clients}}}
}

func inTurn(n int32) v1alpha1.Plan {
	return v1alpha1.Plan{TimeSliced: &v1alpha1.TimeSlicedPlan{Replicas: n}}
}

func sharedParts(shares int32, profiles ...string) v1alpha1.Plan {
	return v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Profiles: profiles, MPS: &v1alpha1.PartitionMPS{Shares: shares}}}
}

func sharedLayout(shares int32, layout ...string) v1alpha1.Plan {
	return v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{Layout: layout, MPS: &v1alpha1.PartitionMPS{Shares: shares}}}
}
