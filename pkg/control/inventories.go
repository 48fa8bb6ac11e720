package control

import (
	"context"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// inventoryReader reads GPUInventories. It distinguishes an inventory that somebody
// deleted from one that is missing because its kind was.
type inventoryReader struct {
	cache client.Reader
	live  client.Reader
	kinds kinds

	mu sync.Mutex
	// created is when the inventory of a node was created that was seen last.
	created map[string]time.Time
}

func newInventoryReader(cache, live client.Reader, k kinds) *inventoryReader {
	return &inventoryReader{cache: cache, live: live, kinds: k, created: make(map[string]time.Time)}
}

// get returns the node's GPUInventory, or nil where somebody has deleted it or it
// never existed. A missing inventory leads to deletions, so that the server is asked
// and not the cache alone.
func (r *inventoryReader) get(ctx context.Context, node string) (*v1alpha1.GPUInventory, error) {
	inv := &v1alpha1.GPUInventory{}
	key := client.ObjectKey{Name: node}
	err := r.cache.Get(ctx, key, inv)
	if apierrors.IsNotFound(err) {
		err = r.live.Get(ctx, key, inv)
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
func (r *inventoryReader) checkGone(ctx context.Context, node string) error {
	r.mu.Lock()
	created := r.created[node]
	r.mu.Unlock()
	if _, err := r.kinds.served(ctx, inventories, created); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.created, node)
	return nil
}
