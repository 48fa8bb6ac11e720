package healthmonitor

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"
)

// probeEvery is the pause between two looks for GPUs that don't respond.
const probeEvery = 5 * time.Second

// watchSilence asks all GPUs for an answer until ctx ends.
func (m *Monitor) watchSilence(ctx context.Context) {
	var silent []string
	for {
		pause(ctx, probeEvery, nil)
		if ctx.Err() != nil {
			return
		}
		silent = m.probe(ctx, silent)
	}
}

// probe returns the GPUs that don't respond. It requests a reading of the facts, which gives
// them a condition, when these are others than before; a GPU that has become silent is read
// again by its own goroutine then.
func (m *Monitor) probe(ctx context.Context, before []string) (silent []string) {
	m.using.RLock()
	defer m.using.RUnlock()
	if m.hardware == nil {
		return nil
	}
	began := time.Now()
	silent = m.hardware.Session.Probe()
	m.cfg.Facts.Looked(began, silent)
	if !slices.Equal(silent, before) {
		klog.FromContext(ctx).Info("The set of GPUs that don't respond has changed", "node", m.cfg.NodeName, "gpus", silent, "before", before)
		m.cfg.Facts.RereadGPUs()
	}
	return silent
}
