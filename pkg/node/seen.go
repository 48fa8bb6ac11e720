package node

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// recallGPUs takes the list of the node's GPUs from the report of the plugin before, if the
// journal has none: a release that kept none in the journal may have run, or a plugin that
// has left nothing on the host. It is called before the driver is looked for.
func (p *plugin) recallGPUs(ctx context.Context) {
	logger := klog.FromContext(ctx)
	if err := p.journal.UnreadableSeen(); err != nil {
		logger.Error(err, "The list of the node's GPUs in the journal is unreadable", "node", p.cfg.NodeName)
	}
	if _, known := p.journal.Seen(); known {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, serverPatience)
	defer cancel()
	gpus, bootID, err := p.reporter.Before(ctx)
	if err == nil && len(gpus) > 0 {
		err = p.journal.PutSeen(holding.Seen{BootID: bootID, GPUs: gpus})
	}
	if err != nil {
		logger.Error(err, "It isn't known which GPUs the node had; one that is lost now may go unnoticed", "node", p.cfg.NodeName)
	}
}
