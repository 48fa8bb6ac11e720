package driver

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/driverroot"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/cdi"
	"github.com/tessera-dra/tessera/pkg/node/facts"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// rereadEvery is how often the hardware is read without a signal.
const rereadEvery = time.Minute

// keepReading reads the hardware at each signal, and from time to time. It returns the
// error that ends this.
func (f *Follower) keepReading(ctx context.Context, root driverroot.Root, session *nvml.Session, version string) error {
	for {
		woken := f.pause(ctx, f.rereadAfter())
		if ctx.Err() != nil {
			return ctx.Err()
		}
		rest := f.closeRest()
		if o := f.takeOrder(ctx, session, rest); o != nil {
			return &closed{Order: o, root: root}
		}
		hostToo := f.cfg.Facts.BeginReading() || !woken || f.cdiFailed != nil
		now, err := f.cfg.Opener.find()
		if err != nil {
			return err
		}
		if !sameRoot(root, now) {
			return fmt.Errorf("the driver has moved from %s to %s", root.Library, now.Library)
		}
		node, err := f.read(ctx, root, session, hostToo)
		if err != nil {
			return err
		}
		if node.DriverVersion != version {
			return fmt.Errorf("the driver was updated from %s to %s", version, node.DriverVersion)
		}
		f.mend(ctx, node)
	}
}

func sameRoot(a, b driverroot.Root) bool {
	return a.Path == b.Path && a.DevRoot == b.DevRoot && a.ProcRoot == b.ProcRoot && a.Library == b.Library && slices.Equal(a.LibraryDirs, b.LibraryDirs)
}

// rereadAfter returns the time after which the hardware is read again without a signal:
// a short one while something is being retried.
func (f *Follower) rereadAfter() time.Duration {
	if f.cdiFailed != nil || f.modules.missing || f.fabricPending {
		return retryDriver
	}
	return rereadEvery
}

// read reads the hardware, and sets the driver of the CDI specifications and the
// facts. It returns all that there is, with the partitions that are created for
// claims, but without the GPUs that are being changed, which are read again in a while.
// The error is about the driver as a whole.
func (f *Follower) read(ctx context.Context, root driverroot.Root, session *nvml.Session, hostToo bool) (gpu.Node, error) {
	f.modules.load(ctx, f.cfg.Opener.host, root, devDir(f.cfg.Opener.host, root))
	programDirs, err := root.ProgramDirs(f.cfg.Opener.host)
	if err != nil {
		return gpu.Node{}, err
	}
	for {
		began := time.Now()
		minorsSet := f.cfg.Specs.MinorsSet()
		r, reported, err := f.readNode(root, session)
		if err != nil {
			return gpu.Node{}, fmt.Errorf("read the GPUs of node %s: %w", f.cfg.NodeName, err)
		}
		current, err := f.cfg.Specs.UpdateDriver(&cdi.Driver{
			Version: r.Node.DriverVersion, Root: root.Path, DevRoot: root.DevRoot, ProcRoot: root.ProcRoot,
			LibraryDirs: root.LibraryDirs, ProgramDirs: programDirs, GPUs: r.Node.GPUs, Session: session,
		}, minorsSet, hostToo)
		if !current {
			continue // the reading is out of date
		}
		f.noteCDI(ctx, err)
		f.noteListing(ctx, r.Listing)
		f.fabricPending = slices.ContainsFunc(r.Node.GPUs, hasPendingFabric)
		f.cfg.Facts.SetListing(r.Listing)
		f.cfg.Facts.Found(f.withConditions(reported))
		f.seen.found(ctx, reported.GPUs)
		f.cfg.Facts.Looked(began, nil)
		if len(r.Unread) > 0 {
			f.cfg.Facts.RereadSoon()
		}
		there := r.Node
		there.GPUs = slices.DeleteFunc(slices.Clone(there.GPUs), func(g gpu.GPU) bool { return slices.Contains(r.Unread, g.UUID) })
		return there, nil
	}
}

// readNode reads the node. It returns all that there is, and the same without the partitions
// that are created for claims.
func (f *Follower) readNode(root driverroot.Root, session *nvml.Session) (_ Reading, reported gpu.Node, _ error) {
	f.cfg.Partitions.BeginReading()
	r, err := ReadNode(f.cfg.NodeName, f.cfg.Opener.host, root, session)
	if err != nil {
		return Reading{}, gpu.Node{}, err
	}
	return r, f.cfg.Partitions.Hide(r.Node, r.Unread, f.seen.has), nil
}

// noteListing logs which GPUs can't be identified, when that changes.
func (f *Follower) noteListing(ctx context.Context, l facts.Listing) {
	if l.Message != f.unidentified {
		klog.FromContext(ctx).Info("The GPUs that can't be identified have changed", "node", f.cfg.NodeName, "listed", l.Listed, "identified", l.Identified, "why", l.Message)
		f.unidentified = l.Message
	}
}

func hasPendingFabric(g gpu.GPU) bool {
	return slices.ContainsFunc(g.Conditions, func(c gpu.Condition) bool { return c.Type == gpu.FabricNotReady })
}

// noteCDI stores why the CDI specifications couldn't be written, nil if they were.
func (f *Follower) noteCDI(ctx context.Context, err error) {
	if err != nil && (f.cdiFailed == nil || f.cdiFailed.Error() != err.Error()) {
		klog.FromContext(ctx).Error(err, "Restoring CDI specifications failed, retrying", "node", f.cfg.NodeName)
	}
	f.cdiFailed = err
}

// withConditions adds the conditions that other parts know of. A GPU without a device node
// needs no CDI specification.
func (f *Follower) withConditions(node gpu.Node) gpu.Node {
	known := f.cfg.conditions()
	for i, g := range node.GPUs {
		node.GPUs[i].Conditions = slices.Concat(g.Conditions, known[g.UUID])
		if f.cdiFailed != nil && g.Minor != gpu.NoMinor {
			node.GPUs[i].Conditions = append(node.GPUs[i].Conditions, gpu.Condition{Type: gpu.CDIFailed, Message: f.cdiFailed.Error()})
		}
	}
	return node
}
