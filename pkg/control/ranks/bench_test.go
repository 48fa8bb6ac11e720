package ranks

import (
	"context"
	"fmt"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/util/flowcontrol"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/control/controltest"
	"github.com/tessera-dra/tessera/pkg/control/kinds"
)

// BenchmarkClaim allocates a claim in a large cluster in use, and releases it again, each an event
// that changes no rank.
func BenchmarkClaim(b *testing.B) {
	const nodes, gpus = 1213, 8 // as many nodes as the bench's part packing has
	f := newFleet(b, slices.Repeat([]int{gpus}, nodes)...)
	f.ranker.Cache = readInventories(b, f.api)
	f.ranker.rate = flowcontrol.NewFakeAlwaysRateLimiter()
	var all []*resourceapi.ResourceClaim
	for i := range nodes {
		for g := range i % (gpus + 1) {
			all = append(all, newClaim(i, g))
		}
	}
	f.claims.Are(all...)
	f.reconcile(0)
	f.reconcile(10)
	if n := f.writes(); n < nodes/2 {
		b.Fatalf("only %d nodes have ranks", n)
	}
	const node = 3 // has three claims
	claims, comes, leaves := f.claims.Informer.GetStore(), newClaim(node, node), false
	for b.Loop() {
		change := claims.Add
		if leaves {
			change = claims.Delete
		}
		leaves = !leaves
		if err := change(comes); err != nil {
			b.Fatal(err)
		}
		if _, err := f.ranker.Reconcile(b.Context(), kinds.Request(fmt.Sprintf("n%d", node))); err != nil {
			b.Fatal(err)
		}
	}
	if n := f.writes(); n > 0 {
		b.Errorf("%d writes", n)
	}
}

// newClaim is a claim for a GPU of a node.
func newClaim(node, gpu int) *resourceapi.ResourceClaim {
	c := controltest.Claim(fmt.Sprintf("n%d", node), device(gpu))
	c.Name = fmt.Sprintf("%d-%d", node, gpu)
	return c
}

// inventories are a cache that copies nothing, as the controller's. The API server in memory
// would take most of the time.
type inventories struct {
	client.Reader
	all map[string]v1alpha1.GPUInventory
}

func readInventories(b *testing.B, api client.Reader) inventories {
	b.Helper()
	var list v1alpha1.GPUInventoryList
	if err := api.List(b.Context(), &list); err != nil {
		b.Fatal(err)
	}
	all := make(map[string]v1alpha1.GPUInventory)
	for _, inv := range list.Items {
		all[inv.Name] = inv
	}
	return inventories{api, all}
}

func (c inventories) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	*obj.(*v1alpha1.GPUInventory) = c.all[key.Name]
	return nil
}
