package allocators

import (
	"fmt"
	"runtime"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/publish"
	"github.com/tessera-dra/tessera/pkg/offer"
	"github.com/tessera-dra/tessera/pkg/offer/offertest"
)

// BenchmarkNodes measures the scheduler's work for a pod with one claim: it tries the allocation
// on each of a hundred nodes with eight H100s, of which half the GPUs are in use.
// cpu-ms/op doesn't depend on what else the machine does.
func BenchmarkNodes(b *testing.B) {
	const nodes = 100
	var pools []*resourceapi.ResourceSlice
	var used []resourceapi.DeviceRequestAllocationResult
	for i := range nodes {
		c := host(b, fmt.Sprintf("node-%02d", i))
		c.Publish()
		for range 4 {
			got, err := c.Ask(b.Context(), fmt.Sprint(len(used)), Request{Kind: "gpu"})
			if err != nil {
				b.Fatal(err)
			}
			used = append(used, got...)
		}
		pools = append(pools, c.Slices()...)
	}
	for _, r := range []Request{{Kind: "gpu"}, {Kind: "mig", Profile: "1g.10gb"}, {Kind: "mig", Profile: "3g.40gb"}} {
		b.Run(r.String(), func(b *testing.B) { tryNodes(b, nodes, pools, used, r, true) })
	}
}

// tryNodes measures a pod's claim that is tried on each node, and fits on all or on none.
func tryNodes(b *testing.B, nodes int, pools []*resourceapi.ResourceSlice, used []resourceapi.DeviceRequestAllocationResult, r Request, fits bool) {
	library := NewLibrary()
	claim, allocated := newClaim("claim", r), state(used)
	runtime.GC()
	b.ReportAllocs()
	began := processorTime(b)
	for b.Loop() {
		a, err := structured.NewAllocator(b.Context(), library.Features, allocated, classLister{}, pools, library.expressions)
		if err != nil {
			b.Fatal(err)
		}
		for i := range nodes {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%02d", i)}}
			if got, err := a.Allocate(b.Context(), node, []*resourceapi.ResourceClaim{claim}); err != nil || (got != nil) != fits {
				b.Fatal(got, err)
			}
		}
	}
	b.ReportMetric((processorTime(b)-began)/float64(b.N), "cpu-ms/op")
}

// host returns a node with eight H100s, with all that hosts report.
func host(b *testing.B, name string) *Cluster {
	n, err := offertest.Host("h100-80gb", 8)
	if err != nil {
		b.Fatal(err)
	}
	n.Name = name
	return &Cluster{
		Node: n, Plans: offertest.OnePlan(n, v1alpha1.Plan{Partitioned: &v1alpha1.PartitionedPlan{}}), Allocator: NewLibrary(),
		Server: Server{Server: offer.Server{Counters: true}, Form: publish.SplitCounters},
	}
}

// processorTime returns the milliseconds that the process has had a processor.
func processorTime(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e6
}
