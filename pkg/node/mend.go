package node

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// mended is the state that is kept from one mend to the next.
type mended struct {
	// lacking are partitions of prepared claims that weren't there.
	lacking map[gpu.Partition]bool
	// again is when to mend again after a failure.
	again time.Time
	said  string // the last trouble that was logged
}

// mend restores CDI specs and MIG partitions of prepared claims that another program
// removed. A partition has to be missing twice in a row: it may have been created
// or released since the hardware was read, and who destroys one by hand does it in
// two steps. What fails
// is left alone for a while, because trying changes the hardware, and each change
// of it leads here.
func (p *plugin) mend(ctx context.Context, there gpu.Node) {
	if time.Now().Before(p.mended.again) {
		return
	}
	before, lacking := p.mended.lacking, map[gpu.Partition]bool{}
	err := p.preparer.Mend(ctx, func(part gpu.Partition) bool {
		if !lacks(there, part) {
			return false
		}
		if !before[part] {
			p.hardware.soon()
		}
		lacking[part] = true
		return before[part]
	})
	p.mended.lacking = lacking
	if err == nil || ctx.Err() != nil {
		p.mended.said = ""
		return
	}
	p.mended.again = time.Now().Add(rereadEvery)
	if p.mended.said != err.Error() {
		klog.FromContext(ctx).Error(err, "Some prepared claims have lost what they were given; it is tried again", "node", p.cfg.NodeName)
		p.mended.said = err.Error()
	}
}

// lacks says whether the node has the GPU, and no fault with it, but not the
// partition.
func lacks(there gpu.Node, p gpu.Partition) bool {
	n := slices.IndexFunc(there.GPUs, func(g gpu.GPU) bool { return g.UUID == p.GPU && g.MIG != nil && len(g.Conditions) == 0 })
	return n >= 0 && !slices.ContainsFunc(there.GPUs[n].MIG.Instances, func(i gpu.Instance) bool {
		return i.UUID != "" && i.Profile == p.Profile && i.Placement == p.Placement
	})
}
