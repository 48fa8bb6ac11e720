package driver

import (
	"context"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/node/partition"
	"github.com/tessera-dra/tessera/pkg/node/prepare"
	"github.com/tessera-dra/tessera/pkg/node/sharing"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Parts of the plugin that use the hardware.
type Parts struct {
	NodeName   string
	Journal    *journal.Journal
	Partitions *partition.Manager
	Sharing    *sharing.Manager
	Preparer   *prepare.Preparer
	Health     *healthmonitor.Monitor
}

// use gives the parts a driver that works.
func (p *Parts) use(host driverroot.Host, root driverroot.Root, session *nvml.Session, bootID string) {
	sys := host.Path(filepath.Join(root.SysRoot, "sys"))
	p.Health.SetHardware(&healthmonitor.Hardware{Session: session, Sys: sys, KernelLog: kernelLog(host, root)})
	p.Preparer.SetDriverLoad(healthmonitor.CurrentLoad(bootID, sys))
	p.Partitions.SetHardware(session)
	p.Sharing.SetHardware(session, SMI(host, root))
}

// suspend keeps the parts from the hardware until the next use or leave.
func (p *Parts) suspend() {
	p.Sharing.Suspend() // after what is in progress
	p.Partitions.Suspend()
	p.Health.SetHardware(nil)
}

// leave takes the hardware from the parts.
func (p *Parts) leave() {
	p.Sharing.SetHardware(nil, nil) // after what is in progress
	p.Partitions.SetHardware(nil)
	p.Health.SetHardware(nil)
}

// Restore undoes what was done to GPUs, unless a claim is prepared.
func (p *Parts) Restore(ctx context.Context) {
	if len(p.Journal.Claims()) > 0 {
		return
	}
	if err := p.Sharing.LeaveHost(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some GPUs' settings, or MPS daemons, stay as claims needed them", "node", p.NodeName)
	}
	if err := p.Partitions.LeaveHost(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some MIG partitions stay on the node's GPUs", "node", p.NodeName)
	}
}

// Recover makes the node agree with the journal. It stops MPS daemons that no
// claim needs before it repairs MIG partitions, because daemons run inside
// partitions, and restores prepared claims last. A step that fails, for example because
// there is no driver, is retried when a driver has been found.
func (p *Parts) Recover(ctx context.Context) {
	if err := p.Sharing.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Recovering MPS daemons failed, retrying", "node", p.NodeName)
	}
	if err := p.Partitions.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Recovering MIG partitions failed, retrying", "node", p.NodeName)
	}
	if err := p.Preparer.Recover(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Some prepared claims can't be restored now", "node", p.NodeName)
	}
}

// conditions returns the GPUs' conditions that follow from the journal, from MIG
// partitions and from sharing.
func (p *Parts) conditions() map[gpu.UUID][]gpu.Condition {
	all := p.Partitions.Conditions()
	for _, some := range []map[gpu.UUID][]gpu.Condition{p.Preparer.Conditions(), p.Sharing.Conditions()} {
		for uuid, more := range some {
			all[uuid] = append(all[uuid], more...)
		}
	}
	return all
}

// kernelLog returns where this process sees the kernel log: among the device nodes of
// the driver, where the simulator's is, or of the host.
func kernelLog(host driverroot.Host, root driverroot.Root) string {
	const file = "dev/kmsg"
	path := host.Path(filepath.Join(root.DevRoot, file))
	if _, err := os.Stat(path); err == nil {
		return path
	}
	return host.Path("/" + file)
}
