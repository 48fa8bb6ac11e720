package node

import (
	"fmt"
	"path/filepath"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/node/usage"
)

// registerUsage adds the metrics of who has which device.
func (p *plugin) registerUsage(host driverroot.Host) error {
	kubelet, err := usage.DialPodResources(host.Path(filepath.Join(p.cfg.KubeletRoot, "pod-resources/kubelet.sock")), gpu.DriverName)
	if err != nil {
		return err
	}
	collector := usage.New(usage.Config{
		NodeName: p.cfg.NodeName,
		Claims:   p.journal.Held,
		Made: func(uuid gpu.UUID) []holding.MadePartition {
			record, _ := p.journal.GPU(uuid)
			return record.Partitions
		},
		GPUs: func() []gpu.GPU {
			known, _ := p.facts.State()
			return known.Node.GPUs
		},
		Containers: kubelet.Containers,
	})
	if err := p.metrics.Register(collector); err != nil {
		return fmt.Errorf("register the metrics of claims: %w", err)
	}
	return nil
}
