package prepare

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/health"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// endedWithin is how long it may take to notice that all containers of a claim have ended:
// the kernel's report takes less than a millisecond, a scan of the host's processes some
// tens.
const endedWithin = 500 * time.Millisecond

// errGivenUp says that the containers of a claim that is given up still run.
var errGivenUp = errors.New("its GPUs were lost when the kubelet unprepared it, and containers that have its devices still run")

// SetDriverLoad sets the current load of the driver: the end of claims that were given up
// under another.
func (p *Preparer) SetDriverLoad(l health.Load) { p.load.Store(&l) }

func (p *Preparer) driverLoad() health.Load {
	if l := p.load.Load(); l != nil {
		return *l
	}
	return health.Load{Boot: p.cfg.BootID}
}

// giveUp returns nil if no process is left of the pods of a claim whose GPUs are lost.
// Otherwise it records that the claim is given up, writes a warning, and returns
// errGivenUp: such a process may never end, and the GPU may come back before it does.
func (p *Preparer) giveUp(ctx context.Context, c kubeletplugin.NamespacedObject, claim holding.Claim) error {
	r := claim.Record
	runs := p.checkEnded(ctx, r)
	if runs == nil || r.GivenUp != nil && claim.State == holding.Recorded {
		return runs
	}
	r.GivenUp, r.BootID = new(p.driverLoad()), p.cfg.BootID // the boot of an unreadable record isn't known
	if err := p.put(r); err != nil {
		return err
	}
	p.cfg.Steps.Reached("unprepare.givenup")
	klog.FromContext(ctx).Info("Gave the claim up: its GPUs are lost, and its containers have not ended", "gpus", r.GPUs(), "reason", runs)
	p.cfg.Events.WarnClaim(c, reasonInUse, fmt.Sprintf("containers that have the claim's devices (%s) still run on this node, and the GPUs are lost: the claim is unprepared, "+
		"and no other claim gets the devices before these containers have ended or the driver was loaded again: %v", describeHoldings(r.Holdings), runs))
	return runs
}

// checkEnded returns errGivenUp if a process may have the devices of a claim whose GPUs are
// or were lost: unless those of its pods have ended, which it doesn't wait for, or the
// driver was loaded again after the claim was given up.
func (p *Preparer) checkEnded(ctx context.Context, r holding.Record) error {
	if g := r.GivenUp; g != nil && (r.BootID != p.cfg.BootID || p.driverLoad().Since(*g)) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, endedWithin)
	defer cancel()
	if err := p.cfg.Containers.AwaitEnd(ctx, r.ClaimUID, podsOf(r)); err != nil {
		return fmt.Errorf("%w: %w", errGivenUp, err)
	}
	return nil
}

// reclaim releases the devices of a claim that was given up. It returns errGivenUp if a
// process may still have them.
func (p *Preparer) reclaim(ctx context.Context, claimUID string) error {
	unlock, err := p.claimLocks.Lock(ctx, claimUID)
	if err != nil {
		return fmt.Errorf("wait for another operation on the claim: %w", err)
	}
	defer unlock()
	if c, _ := p.cfg.Journal.Claim(claimUID); c.GivenUp == nil {
		return nil // it was released, or prepared again
	}
	return p.withdraw(ctx, claimUID, func(c holding.Claim) error { return p.checkEnded(ctx, c.Record) })
}
