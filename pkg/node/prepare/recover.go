package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Recover makes the node agree with the journal again. It creates missing partitions
// of prepared claims, sets up their sharing, writes the CDI specs of all prepared
// claims, whose directory may have been wiped or whose writing a crash may have cut
// off, removes the specs of claims that have no record, and releases the devices of
// claims that were given up, as Mend does.
//
// A claim with partitions or shares that was prepared in an earlier boot has lost
// them, and its containers have ended; it gets new ones when the kubelet prepares
// it again.
//
// It is for the start, before the plugin registers with the kubelet, and may
// be called again at any time, for instance when the driver has changed. A failure
// of one claim doesn't stop the others: its record stays, and the error names all
// such claims. The plugin goes on after an error.
func (p *Preparer) Recover(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	claims := p.cfg.Journal.Claims()
	for _, c := range claims.Unreadable() {
		logger.Error(c.Err, "A journal file can't be read and was renamed", "path", c.File, "claimUID", c.ClaimUID, "gpus", c.GPUs())
	}
	return errors.Join(p.restoreAll(ctx, claims.Readable()), p.sweep(ctx))
}

// Mend restores the prepared claims whose CDI spec somebody has removed, or that
// hold a partition which gone says isn't there any more: the kubelet restarts
// containers without preparing their claims again. It skips claims that
// are being prepared or unprepared, or that wait for the kubelet's next call. It also
// releases the devices of claims that were given up, if no process can have them any more.
// It may be called often: if nothing is missing, it only lists the CDI directory.
func (p *Preparer) Mend(ctx context.Context, gone func(gpu.Partition) bool) error {
	prepared := slices.DeleteFunc(p.cfg.Journal.Claims().Readable(), func(c holding.Claim) bool {
		return p.claimLocks.InUse(c.ClaimUID) || c.GivenUp == nil && (c.AwaitsKubelet(p.cfg.BootID) || c.Phase >= holding.Unpreparing)
	})
	specs, err := p.cfg.Specs.Claims()
	if err != nil {
		return fmt.Errorf("list the CDI specs: %w", err)
	}
	isGone := func(d gpu.Device) bool {
		part, ok := gpu.Base(d).(gpu.Partition)
		return ok && gone(part)
	}
	return p.restoreAll(ctx, slices.DeleteFunc(prepared, func(c holding.Claim) bool {
		return c.GivenUp == nil && slices.Contains(specs, c.ClaimUID) && !slices.ContainsFunc(held(c.Record), isGone)
	}))
}

// restoreAtOnce is how many claims are restored side by side: enough for all
// GPUs of a node to be made partitions on.
const restoreAtOnce = 32

// restoreAll restores prepared claims, and reclaims the devices of those that were given
// up; the error is of all that fail, in the order of the records.
func (p *Preparer) restoreAll(ctx context.Context, claims holding.Claims) error {
	errs := make([]error, len(claims))
	var group errgroup.Group
	group.SetLimit(restoreAtOnce)
	for i, c := range claims {
		group.Go(func() error {
			do := p.restore
			if c.GivenUp != nil {
				do = p.reclaim
			}
			if err := do(ctx, c.ClaimUID); err != nil && !errors.Is(err, errGivenUp) {
				errs[i] = fmt.Errorf("claim %s/%s (UID %s): %w", c.Namespace, c.Name, c.ClaimUID, err)
			}
			return nil
		})
	}
	_ = group.Wait() // the errors are in errs
	return errors.Join(errs...)
}

// restore creates the devices and the spec of one prepared claim again where they
// are missing.
func (p *Preparer) restore(ctx context.Context, claimUID string) error {
	unlock, err := p.claimLocks.Lock(ctx, claimUID)
	if err != nil {
		return err
	}
	defer unlock()
	c, ok := p.cfg.Journal.Claim(claimUID)
	if !ok || c.IsUnreadable() || c.GivenUp != nil || c.Phase >= holding.Unpreparing {
		return nil
	}
	r := c.Record
	if r.AwaitsKubelet(p.cfg.BootID) {
		return p.removeSpec(claimUID)
	}
	if err := p.resolvable(r); err != nil {
		return err
	}
	realized, err := p.readyDevices(ctx, r)
	if err == nil {
		realized.Daemons, err = p.restoreSharing(ctx, realized)
	}
	if err != nil {
		return err
	}
	if _, err := p.cfg.Specs.Write(realized); err != nil {
		return fmt.Errorf("write the CDI spec again: %w", err)
	}
	p.cfg.Steps.Reached("recover.written")
	p.noteRestored(r)
	p.notifyPrepared(realized)
	return nil
}

// restoreSharing sets up daemons and settings of a prepared claim again. It doesn't wait for a
// daemon that fails: other claims are to be restored, too.
func (p *Preparer) restoreSharing(ctx context.Context, realized holding.Realized) (map[string]gpu.MPSDirs, error) {
	if !realized.Shares() {
		return nil, nil //nolint:nilnil // no daemons
	}
	dirs, err := p.cfg.Sharing.Join(ctx, realized.Record, realized.Instances)
	if err != nil {
		return nil, fmt.Errorf("set up what the claim shares: %w", err)
	}
	p.cfg.Steps.Reached("prepare.joined")
	return dirs, nil
}

// removeSpec is idempotent.
func (p *Preparer) removeSpec(claimUID string) error {
	if err := p.cfg.Specs.Remove(claimUID); err != nil {
		return err
	}
	p.cfg.Steps.Reached("recover.removed")
	return nil
}

// resolvable is an error where the node doesn't have all of the record's devices
// now.
func (p *Preparer) resolvable(r holding.Record) error {
	for _, g := range r.Holdings {
		if _, _, err := p.resolve(g.Request, g.Device); err != nil {
			return err
		}
	}
	return nil
}

// sweep removes specs and marks of claims without a record. A claim whose record
// can't be read keeps them: its containers may be restarted.
func (p *Preparer) sweep(ctx context.Context) error {
	specs, err := p.cfg.Specs.Claims()
	if err != nil {
		return fmt.Errorf("list the CDI specs: %w", err)
	}
	marks, err := p.cfg.Containers.Marks()
	if err != nil {
		return err
	}
	var errs []error
	for _, uid := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(specs, marks)))) {
		if err := p.removeOrphan(ctx, uid); err != nil {
			errs = append(errs, fmt.Errorf("remove the CDI spec of claim %s, which isn't prepared: %w", uid, err))
		}
	}
	return errors.Join(errs...)
}

func (p *Preparer) removeOrphan(ctx context.Context, claimUID string) error {
	unlock, err := p.claimLocks.Lock(ctx, claimUID)
	if err != nil {
		return err
	}
	defer unlock()
	if _, ok := p.cfg.Journal.Claim(claimUID); ok {
		return nil
	}
	klog.FromContext(ctx).V(2).Info("Removing what is left of a claim that isn't prepared", "claimUID", claimUID)
	if err := p.removeSpec(claimUID); err != nil {
		return err
	}
	return p.cfg.Containers.Unmark(claimUID)
}
