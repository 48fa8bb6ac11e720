package node

import (
	"os"
	"path/filepath"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	decide "github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/driver"
	"github.com/tessera-dra/tessera/pkg/node/health"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// newHealth builds the watch over the GPUs' health.
func (p *plugin) newHealth() *health.Monitor {
	var unreadable []gpu.UUID
	for _, u := range p.journal.UnreadableHealth() {
		unreadable = append(unreadable, u.GPU)
	}
	return health.New(health.Config{
		NodeName: p.cfg.NodeName, Journal: p.journal, Unreadable: unreadable, Facts: p.facts,
		Registerer: p.metrics, Holders: p.holders, PodOf: p.podOf, Address: p.addressOf, Events: p.warnings,
	})
}

// healthOf returns a function that returns the parts of a driver that the watch over the
// GPUs' health needs.
func healthOf(host driverroot.Host, bootID string) func(driver.Hardware) *health.Hardware {
	return func(hw driver.Hardware) *health.Hardware {
		sys := host.Path(filepath.Join(hw.Root.SysRoot, "sys"))
		return &health.Hardware{
			Session: hw.Session, Load: func() decide.Load { return health.Load(bootID, sys) },
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
func (p *plugin) podOf(pid int) (health.Pod, bool) {
	namespace, name, uid := p.containers.PodOf(pid)
	return health.Pod{Namespace: namespace, Name: name, UID: uid}, uid != ""
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
func (p *plugin) holders(x gpu.XID) []health.Pod {
	var instances []gpu.Instance
	known, _ := p.facts.State()
	for _, g := range known.Node.GPUs {
		if g.UUID == x.GPU && g.MIG != nil {
			instances = append(instances, g.MIG.Instances...) // made by others
		}
	}
	if r, ok := p.journal.GPU(x.GPU); ok {
		for _, made := range r.Partitions {
			if made.Made == nil {
				continue
			}
			instances = append(instances, gpu.Instance{
				Profile: made.Profile, Placement: gpu.Placement{Start: made.Start, Size: made.Size},
				GPUInstanceID: made.Made.GPUInstanceID, ComputeInstanceID: made.Made.ComputeInstanceID,
			})
		}
	}
	return health.Holders(x, p.journal.Held(), instances)
}
