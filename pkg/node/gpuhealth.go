package node

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/healthmonitor"
	"github.com/tessera-dra/tessera/pkg/node/journal"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// newHealth builds the watch over the GPUs' health.
func (p *plugin) newHealth() *healthmonitor.Monitor {
	var unreadable []gpu.UUID
	for _, u := range p.journal.UnreadableHealth() {
		unreadable = append(unreadable, u.GPU)
	}
	return healthmonitor.New(healthmonitor.Config{
		NodeName: p.cfg.NodeName, Journal: p.journal, Unreadable: unreadable, Facts: p.facts,
		Registerer: p.metrics, Holders: p.holders, PodOf: p.podOf, Address: p.addressOf, Events: p.warnings, DaemonFaults: p.sharing.DaemonFaults,
		Resetter: p.resets,
	})
}

// healthOf returns a function that returns the parts of a driver that the watch over the
// GPUs' health needs.
func healthOf(host driverroot.Host, bootID string) func(driver.Hardware) *healthmonitor.Hardware {
	return func(hw driver.Hardware) *healthmonitor.Hardware {
		sys := host.Path(filepath.Join(hw.Root.SysRoot, "sys"))
		return &healthmonitor.Hardware{
			Session: hw.Session, Load: func() health.Load { return healthmonitor.CurrentLoad(bootID, sys) },
			KernelLog: kernelLog(host, hw.Root),
		}
	}
}

// kernelLog returns where this process sees the kernel log: among the device nodes of
// the driver, where the simulator's is, or of the host.
func kernelLog(host driverroot.Host, root driverroot.Root) string {
	const file = "dev/kmsg"
	if path := host.Path(filepath.Join(root.DevRoot, file)); isFile(path) {
		return path
	}
	return host.Path("/" + file)
}

func isFile(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// podOf returns the pod of a process of the host.
func (p *plugin) podOf(pid int) (healthmonitor.Pod, bool) {
	namespace, name, uid := p.containers.PodOf(pid)
	return healthmonitor.Pod{Namespace: namespace, Name: name, UID: uid}, uid != ""
}

// addressOf returns the GPU's PCI address; empty: not known.
func (p *plugin) addressOf(uuid gpu.UUID) gpu.PCIAddress {
	known, _ := p.facts.State()
	for _, g := range known.Node.GPUs {
		if g.UUID == uuid {
			return g.PCI
		}
	}
	return ""
}

// sawEvent passes on an event of a GPU.
func (p *plugin) sawEvent(e nvml.Event) {
	switch {
	case e.XID != nil:
		p.health.SawXID(*e.XID)
	case e.Kind != nvml.EventMIG:
		p.health.SawEvent(e.GPU)
	}
}

// holders returns the pods that use an XID's GPU or instance.
func (p *plugin) holders(x gpu.XID) []healthmonitor.Pod {
	var instances []gpu.Instance
	known, _ := p.facts.State()
	for _, g := range known.Node.GPUs {
		if g.UUID == x.GPU && g.MIG != nil {
			instances = append(instances, g.MIG.Instances...) // made by others
		}
	}
	for _, made := range p.partitions.Made(x.GPU) {
		if made.Made == nil {
			continue
		}
		instances = append(instances, gpu.Instance{
			Profile: made.Profile, Placement: gpu.Placement{Start: made.Start, Size: made.Size},
			GPUInstanceID: made.Made.GPUInstanceID, ComputeInstanceID: made.Made.ComputeInstanceID,
		})
	}
	return healthmonitor.Holders(x, p.journal.Claims().Records(), instances)
}

// forgetHealthyGPUs removes the records of GPUs with which nothing is wrong: they say how
// often a cause came back, who ended one, and when the GPU was reset. Those of a plugin that
// was killed stay.
func forgetHealthyGPUs(j *journal.Journal) error {
	var errs []error
	for _, h := range j.AllHealth() {
		if len(h.State.Causes) == 0 {
			errs = append(errs, j.DeleteHealth(h.GPU))
		}
	}
	return errors.Join(errs...)
}
