package report

import (
	"context"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// Reported makes the reporter one that has written inv after a registration.
func (r *Reporter) Reported(inv *v1alpha1.GPUInventory) {
	r.facts.SetRegistered()
	known, _ := r.facts.State()
	inv.Status.RegisteredAt = registeredAt(known)
	r.inventory, r.reported = inv, true
}

// Saw is called with each inventory that the watch shows.
func (r *Reporter) Saw(inv *v1alpha1.GPUInventory) { r.saw(inv) }

// Gather waits for changes of the facts that come together.
func (r *Reporter) Gather(ctx context.Context) { r.gather(ctx) }
