package node

import (
	"context"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/node/usage"
)

// hardwareParts are the parts that use the hardware. They listen to the driver.
type hardwareParts struct {
	nodeName   string
	journal    *journal.Journal
	sharing    *sharing.Manager
	partitions *partition.Manager
	preparer   *prepare.Preparer
	health     *healthmonitor.Monitor
	// healthOf returns the parts of a driver that health needs.
	healthOf func(driver.Hardware) *healthmonitor.Hardware
	readings *usage.Readings
	// handsOver: another plugin takes the hardware as it is.
	handsOver atomic.Bool
}

// Arrived gives the parts the hardware, and makes the node agree with the journal.
func (p *hardwareParts) Arrived(ctx context.Context, hw driver.Hardware) {
	watched := p.healthOf(hw)
	p.health.SetHardware(watched)
	p.preparer.SetDriverLoad(watched.Load())
	p.partitions.SetHardware(hw.Session)
	p.sharing.SetHardware(hw.Session, hw.SMI)
	p.readings.SetHardware(hw.Session)
	p.recover(ctx)
}

// Mend restores what prepared claims lack.
func (p *hardwareParts) Mend(ctx context.Context, lacking func(gpu.Partition) bool) error {
	return p.preparer.Mend(ctx, lacking)
}

// Suspend keeps the parts from the hardware until the next Arrived or BeforeClose.
func (p *hardwareParts) Suspend() {
	p.sharing.Suspend() // after what is in progress
	p.partitions.Suspend()
	p.health.SetHardware(nil)
	p.readings.SetHardware(nil)
}

// BeforeClose takes the hardware from the parts, and restores it before if the plugin
// ends, no other takes over, and nothing is prepared.
func (p *hardwareParts) BeforeClose(ctx context.Context, pluginEnds bool) {
	if pluginEnds && !p.handsOver.Load() && len(p.journal.Claims()) == 0 {
		p.restore(ctx)
	}
	p.sharing.SetHardware(nil, nil) // after what is in progress
	p.partitions.SetHardware(nil)
	p.health.SetHardware(nil)
	p.readings.SetHardware(nil)
}

// restore undoes what was done to GPUs.
func (p *hardwareParts) restore(ctx context.Context) {
	if err := p.sharing.LeaveHost(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some GPUs' settings, or MPS daemons, stay as claims needed them", "node", p.nodeName)
	}
	if err := p.partitions.LeaveHost(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some MIG partitions stay on the node's GPUs", "node", p.nodeName)
	}
}

// recover makes the node agree with the journal. It stops MPS daemons that no
// claim needs before it repairs MIG partitions, because daemons run inside
// partitions, and restores prepared claims last. A step that fails, for example because
// there is no driver, is retried when a driver has been found.
func (p *hardwareParts) recover(ctx context.Context) {
	if err := p.sharing.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Recovering MPS daemons failed, retrying", "node", p.nodeName)
	}
	if err := p.partitions.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Recovering MIG partitions failed, retrying", "node", p.nodeName)
	}
	if err := p.preparer.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some prepared claims can't be restored now", "node", p.nodeName)
	}
}

// recoverWithoutDriver calls recover without a driver: steps that need one fail, and are
// retried later. It returns after driver.RecoverWithin at the latest, so that the plugin
// can register with the kubelet.
func (p *hardwareParts) recoverWithoutDriver(ctx context.Context) {
	recovered := make(chan struct{})
	go func() {
		defer close(recovered)
		p.recover(ctx)
	}()
	select {
	case <-recovered:
	case <-time.After(driver.RecoverWithin):
	case <-ctx.Done():
	}
}

// Conditions returns the GPUs' conditions that follow from the journal, from MIG
// partitions and from sharing.
func (p *hardwareParts) Conditions() map[gpu.UUID][]gpu.Condition {
	all := p.partitions.Conditions()
	for _, some := range []map[gpu.UUID][]gpu.Condition{p.preparer.Conditions(), p.sharing.Conditions()} {
		for uuid, more := range some {
			all[uuid] = append(all[uuid], more...)
		}
	}
	return all
}
