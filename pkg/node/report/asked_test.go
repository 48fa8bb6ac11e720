package report_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
	warm, slices := make(chan map[gpu.UUID]time.Duration, 100), make(chan map[gpu.UUID]string, 100)
	known := facts.New("node-0")
	r, err := report.New(report.Config{
		NodeName: "node-0", REST: s.config(), Facts: known,
		Seen: func(inv *v1alpha1.GPUInventory) {
			warm <- inventory.KeepWarm(inv)
			slices <- inventory.TimeSlices(inv)
		},
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
	if diff := cmp.Diff(map[gpu.UUID]string{}, <-slices); diff != "" {
		t.Errorf("without a policy (-want +got):\n%s", diff)
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
	for got := (map[gpu.UUID]string{}); got["GPU-1"] != "Long" || len(got) != 1; {
		got = <-slices
	}
	for got := (map[gpu.UUID]time.Duration{}); got["GPU-2"] != time.Minute || len(got) != 1; {
		got = <-warm
	}
}
