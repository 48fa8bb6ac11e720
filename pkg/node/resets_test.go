package node

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/sim/nvmlsim"
)

// noEvents drops events.
type noEvents struct{}

func (noEvents) WarnPod(string, holding.Pod, string, string) {}
func (noEvents) OnNode(string, string, string)               {}

// TestPrepareWaitsForReset checks that a GPU is neither reset while a claim has any of
// it nor given to a claim while it is reset, and that partitions are made again
// after the reset, which ends those that are kept warm.
func TestPrepareWaitsForReset(t *testing.T) {
	d, _ := startDivided(t)
	m, err := installed.Hardware()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	t.Cleanup(func() { _, _ = m.ClearFaults(), m.Heal(0) })
	name, uuid := installed.Names()[0], gpu.UUID(installed.Machine.GPUs[0].UUID)
	d.partitions.SetKeepWarm(map[gpu.UUID]time.Duration{uuid: time.Hour})
	before := claimOf("before", name+"-mig-3g40gb-4")
	if _, err := d.preparer.Prepare(d.ctx, before); err != nil {
		t.Fatal(err)
	}
	inv := &v1alpha1.GPUInventory{}
	inv.Spec.GPUs = []v1alpha1.GPUSpec{{UUID: string(uuid), Reset: v1alpha1.ResetWhenIdle}}
	d.health.SawInventory(inv)
	if err := errors.Join(m.SetRecoveryAction(0, 1), m.Fault(nvmlsim.Fault{Call: "DeviceReset", GPU: 0, Hang: true})); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(d.ctx)
	var running sync.WaitGroup
	running.Go(func() { d.health.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	d.eventually(t, "that the claim keeps the GPU from being reset", func() bool {
		state, _ := d.facts.State()
		all := state.Node.GPUs[0].Conditions
		return len(all) == 1 && all[0].Type == gpu.ResetRequired && strings.Contains(all[0].Message, "default/before")
	})
	if err := d.unprepare(before); err != nil {
		t.Fatal(err)
	}
	d.eventually(t, "the reset", d.follower.IsResetting)
	soon, cancelSoon := context.WithTimeout(d.ctx, 100*time.Millisecond)
	defer cancelSoon()
	if _, err := d.preparer.Prepare(soon, claimOf("during", name+"-mig-3g40gb-4")); err == nil || !strings.Contains(err.Error(), "it is being reset") {
		t.Errorf("prepared during the reset: %v", err)
	}
	if err := m.ClearFaults(); err != nil {
		t.Fatal(err)
	}
	after := claimOf("after", name+"-mig-3g40gb-4")
	if _, err := d.preparer.Prepare(d.ctx, after); err != nil {
		t.Errorf("after the reset: %v", err)
	}
	d.checkWithDoctor(t)
	if err := d.unprepare(after); err != nil {
		t.Error(err)
	}
}
