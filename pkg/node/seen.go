package node

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/inventory"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// recallGPUs makes the journal's list of the node's GPUs the one to begin with, before the
// driver is looked for. If the journal has none, it comes from the report of the plugin
// before: a release that kept none in the journal may have run, or a plugin that has left
// nothing on the host. If there is no report, the list goes: the Node has been deleted, and
// was added again, perhaps with other GPUs.
func (p *plugin) recallGPUs(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if err := p.journal.UnreadableSeen(); err != nil {
		logger.Error(err, "The list of the node's GPUs in the journal is unreadable", "node", p.cfg.NodeName)
	}
	_, known := p.journal.Seen()
	if known && p.tenure.tookOver {
		return // the plugin before has served the same Node until now
	}
	ctx, cancel := context.WithTimeout(ctx, serverPatience)
	defer cancel()
	report, err := p.reporter.Get(ctx)
	switch {
	case err != nil && known:
		return // the list counts while the API server is away
	case err != nil:
	case report == nil:
		err = p.journal.DeleteSeen()
	case !known:
		err = p.keepReported(report)
	}
	if err != nil {
		logger.Error(err, "It isn't known which GPUs the node had; one that is lost now may go unnoticed, and one that was taken out may be missed", "node", p.cfg.NodeName)
	}
}

// keepReported writes the GPUs of a report to the journal.
func (p *plugin) keepReported(report *v1alpha1.GPUInventory) error {
	gpus := inventory.Node(report).GPUs
	if len(gpus) == 0 {
		return nil
	}
	return p.journal.PutSeen(holding.Seen{BootID: report.Status.BootID, GPUs: gpus})
}
