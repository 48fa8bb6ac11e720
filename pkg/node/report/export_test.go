package report

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
)

// Reported makes the reporter one that has written inv after a registration.
func (r *Reporter) Reported(inv *v1alpha1.GPUInventory, registered time.Time) {
	at := metav1.NewMicroTime(registered)
	inv.Status.RegisteredAt = &at
	r.inventory, r.registeredAt, r.reported = inv, &at, true
}

// Saw is called with each inventory that the watch shows.
func (r *Reporter) Saw(inv *v1alpha1.GPUInventory) { r.saw(inv) }

// Gather waits for changes of the facts that come together.
func (r *Reporter) Gather(ctx context.Context) { r.gather(ctx) }
