package driver

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
// two steps. After a failure there is a pause, because an attempt changes the
// hardware, and each change of it leads here.
func (f *Follower) mend(ctx context.Context, there gpu.Node) {
	if time.Now().Before(f.mended.again) {
		return
	}
	before, lacking := f.mended.lacking, map[gpu.Partition]bool{}
	err := f.cfg.Preparer.Mend(ctx, func(part gpu.Partition) bool {
		if !lacks(there, part) {
			return false
		}
		if !before[part] {
			f.cfg.Facts.RereadSoon()
		}
		lacking[part] = true
		return before[part]
	})
	f.mended.lacking = lacking
	if err == nil || ctx.Err() != nil {
		f.mended.said = ""
		return
	}
	f.mended.again = time.Now().Add(rereadEvery)
	if f.mended.said != err.Error() {
		klog.FromContext(ctx).Error(err, "Some prepared claims have lost what they were given; it is tried again", "node", f.cfg.NodeName)
		f.mended.said = err.Error()
	}
}

// lacks reports whether the node has the GPU, and it answers, but not the partition.
func lacks(there gpu.Node, p gpu.Partition) bool {
	n := slices.IndexFunc(there.GPUs, func(g gpu.GPU) bool { return g.UUID == p.GPU && g.MIG != nil && g.Answered() })
	return n >= 0 && !slices.ContainsFunc(there.GPUs[n].MIG.Instances, func(i gpu.Instance) bool {
		return i.UUID != "" && i.Profile == p.Profile && i.Placement == p.Placement
	})
}
