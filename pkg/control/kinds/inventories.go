package kinds

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// InventoryReader reads GPUInventories. It distinguishes an inventory that somebody
// deleted from one that is missing because its kind was.
type InventoryReader struct {
	cache       client.Reader
	definitions Definitions

	mu sync.Mutex
	// created is when the inventory of a node was created that was seen last.
	created map[string]time.Time
}

// NewInventoryReader returns a reader of a cache, and of the server where the cache has nothing.
func NewInventoryReader(cache, server client.Reader, c clock.PassiveClock) *InventoryReader {
	return &InventoryReader{cache: cache, definitions: Definitions{server, c}, created: make(map[string]time.Time)}
}

// Get returns the node's GPUInventory, or nil where somebody has deleted it or it
// never existed. A missing inventory leads to deletions, so that the server is asked
// and not the cache alone.
func (r *InventoryReader) Get(ctx context.Context, node string) (*v1alpha1.GPUInventory, error) {
	inv := &v1alpha1.GPUInventory{}
	key := client.ObjectKey{Name: node}
	err := r.cache.Get(ctx, key, inv)
	if apierrors.IsNotFound(err) {
		err = r.definitions.Server.Get(ctx, key, inv)
	}
	switch {
	case apierrors.IsNotFound(err):
		return nil, r.checkGone(ctx, node)
	case err != nil:
		return nil, fmt.Errorf("read GPUInventory %s: %w", node, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.created[node] = inv.CreationTimestamp.Time
	return inv, nil
}

// checkGone returns an error if the node's missing inventory may have gone with its
// kind. It doesn't hold the lock while it asks the server.
func (r *InventoryReader) checkGone(ctx context.Context, node string) error {
	r.mu.Lock()
	created := r.created[node]
	r.mu.Unlock()
	if _, err := r.definitions.Served(ctx, Inventories, created); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.created, node)
	return nil
}

// UntilReported returns how much longer to wait for the status of an inventory that
// a plugin has created without one: nothing follows from that for a while. It is 0
// or less if there is nothing to wait for.
func (r *InventoryReader) UntilReported(inv *v1alpha1.GPUInventory) time.Duration {
	if inv == nil || inv.DeletionTimestamp != nil || !equality.Semantic.DeepEqual(inv.Status, v1alpha1.GPUInventoryStatus{}) {
		return 0
	}
	return inv.CreationTimestamp.Add(ReportWithin).Sub(r.definitions.Clock.Now())
}

// DriverFails reports whether the node's driver doesn't work, so that its GPUs are unknown.
func DriverFails(inv *v1alpha1.GPUInventory) bool {
	ready := meta.FindStatusCondition(inv.Status.Conditions, v1alpha1.ConditionReady)
	return ready != nil && ready.Reason == v1alpha1.ReasonNVMLError
}
