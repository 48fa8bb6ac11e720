package kinds

import (
	"context"
	"errors"
	"testing"
	"time"

	testingclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/tessera-dra/tessera/pkg/control/controltest"
)

// TestServerIsAskedWithoutALock checks that a slow answer about one node's inventory doesn't
// delay the other nodes.
func TestServerIsAskedWithoutALock(t *testing.T) {
	api, asked := controltest.NewAPI(t), 0
	var r *InventoryReader
	server := interceptor.NewClient(api, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			asked++
			if !r.mu.TryLock() {
				return errors.New("the lock is held")
			}
			r.mu.Unlock()
			return c.Get(ctx, key, o, opts...)
		},
	})
	r = NewInventoryReader(api, server, testingclock.NewFakePassiveClock(time.Unix(1000, 0)))
	if inv, err := r.Get(t.Context(), "missing"); inv != nil || err != nil || asked != 2 {
		t.Errorf("got %v, %v, asked %d times, want that it is gone after two questions", inv, err, asked)
	}
}
