package report_test

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2/ktesting"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/node/report"
)

// TestWhatPoliciesAsk of the node reaches those who do it.
func TestWhatPoliciesAsk(t *testing.T) {
	s := newServer(t)
	known := facts.New("node-0")
	r, err := report.New(report.Config{
		NodeName: "node-0", REST: s.config(), Facts: known,
	})
	if err != nil {
		t.Fatal(err)
	}
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	defer func() { cancel(); s.CloseClientConnections(); <-done }()
	known.Found(node(h100))
	asked := func() (warm map[gpu.UUID]time.Duration, slices map[gpu.UUID]string) {
		for {
			inv, changed := r.Inventory()
			if inv != nil {
				return inventory.KeepWarm(inv), inventory.TimeSlices(inv)
			}
			<-changed
		}
	}
	if _, slices := asked(); len(slices) > 0 {
		t.Errorf("without a policy: %v", slices)
	}
	eventually(t, s, "a report", func(*v1alpha1.GPUInventory) bool { return true })
	s.change("gpuinventories", func() (string, any) {
		inv := s.inventory.DeepCopy()
		inv.Spec.GPUs = []v1alpha1.GPUSpec{
			{UUID: "GPU-1", TimeSlice: v1alpha1.LongTimeSlice}, {UUID: "GPU-2", KeepWarm: &metav1.Duration{Duration: time.Minute}},
		}
		s.store(inv)
		return "MODIFIED", inv
	})
	for {
		_, changed := r.Inventory()
		if warm, slices := asked(); len(slices) == 1 && slices["GPU-1"] == "Long" && len(warm) == 1 && warm["GPU-2"] == time.Minute {
			return
		}
		<-changed
	}
}
