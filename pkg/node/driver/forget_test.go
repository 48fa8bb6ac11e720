package driver

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// TestForget checks that a GPU of an earlier report that NVML doesn't list stays in the facts
// until it is forgotten, and that one that is there can't be.
func TestForget(t *testing.T) {
	f := newFixture(t)
	gone := gpu.GPU{UUID: "GPU-99999999-8a10-0135-bada-13f71feaef21", Index: 7}
	f.saw(t, "boot", gone)
	f.start(t)
	<-f.Looked()
	has := func(uuid gpu.UUID) bool {
		all, _, _ := f.Facts.GPUs()
		return slices.Contains(all, uuid)
	}
	if !has(gone.UUID) {
		t.Fatal("the facts don't have the GPU of the report")
	}
	there := gpu.UUID(installed.Machine.GPUs[0].UUID)
	if err := f.Health.OrderForget(t.Context(), there); err == nil || !has(there) {
		t.Errorf("a GPU that NVML lists: %v; in the facts: %t", err, has(there))
	}
	if err := f.Health.OrderForget(t.Context(), gone.UUID); err != nil {
		t.Fatal(err)
	}
	if has(gone.UUID) {
		t.Error("the facts have a GPU that was forgotten")
	}
	if seen, _ := f.Journal.Seen(); len(seen.GPUs) != len(installed.Machine.GPUs) {
		t.Errorf("the next plugin would know of %d GPUs", len(seen.GPUs))
	}
	before, changed := f.Facts.State()
	f.Facts.Reread()
	<-changed // it was read again
	if after, _ := f.Facts.State(); len(after.Node.GPUs) != len(before.Node.GPUs) || has(gone.UUID) {
		t.Errorf("the next reading has found %d GPUs, want %d", len(after.Node.GPUs), len(before.Node.GPUs))
	}
}

// TestForgetIsGivenUp checks that a GPU that could not be forgotten in time, because there was
// no session, stays in the facts when there is one.
func TestForgetIsGivenUp(t *testing.T) {
	f := newFixture(t)
	gone := gpu.GPU{UUID: "GPU-99999999-8a10-0135-bada-13f71feaef21", Index: 7}
	f.saw(t, "boot", gone)
	f.build()
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() { failed <- f.Health.OrderForget(ctx, gone.UUID) }()
	f.Facts.AwaitRequest(ctx, time.Minute) // it has requested it
	cancel()
	if err := <-failed; err == nil {
		t.Fatal("forgotten without a session")
	}
	f.run(t)
	<-f.Looked()
	_, changed := f.Facts.State()
	f.Facts.Reread()
	<-changed // it was read again
	if all, _, _ := f.Facts.GPUs(); !slices.Contains(all, gone.UUID) {
		t.Error("the GPU was forgotten after Forget had returned an error")
	}
}
