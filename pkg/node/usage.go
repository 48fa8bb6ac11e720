package node

import (
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/usage"
)

// newReadings returns readings that know no GPU yet.
func (p *plugin) newReadings(host driverroot.Host) *usage.Readings {
	// In a PID namespace of its own, the driver would tell no processes, or others than
	// the host's /proc has.
	own, ownErr := os.Readlink("/proc/self/ns/pid")
	hosts, hostErr := os.Readlink(host.Path("/proc/1/ns/pid"))
	seesProcesses := own == hosts && ownErr == nil && hostErr == nil
	if !seesProcesses {
		klog.Background().Info("The plugin isn't in the host's PID namespace (hostPID): how much memory each share uses can't be told", "node", p.cfg.NodeName)
	}
	return usage.NewReadings(p.facts, p.containers, seesProcesses)
}

// registerUsage adds the metrics of who has which device.
func (p *plugin) registerUsage(host driverroot.Host, bootID string) error {
	kubelet, err := usage.DialPodResources(host.Path(filepath.Join(p.cfg.KubeletRoot, "pod-resources/kubelet.sock")), gpu.DriverName)
	if err != nil {
		return err
	}
	collector := usage.New(usage.Config{
		NodeName: p.cfg.NodeName, BootID: bootID, Journal: p.journal, Facts: p.facts, Kubelet: kubelet, Containers: p.containers, Readings: p.readings,
	})
	if err := p.metrics.Register(collector); err != nil {
		return fmt.Errorf("register the metrics of claims: %w", err)
	}
	return nil
}
