package prepare

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// Unprepare releases the claim's devices. When it returns nil, no record and no CDI
// spec of the claim is left, and its partitions are destroyed, kept warm, or used by
// other claims; or the claim is given up (below). A claim without a record succeeds.
// Before anything is released, it waits until no process is left of any pod that
// used the claim, until shortly before the context's deadline; then it fails, the
// record stays, and a warning names the pods. It doesn't wait for processes of a
// claim whose GPUs are all lost, which may never end. If some are left, the claim is
// given up: the record stays and keeps the devices from other claims, until Mend, Recover
// or the prepare of another claim finds that the processes have ended or the driver was
// loaded again. Prepares of the claim that began before are stopped, and leave nothing
// behind.
func (p *Preparer) Unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	start := time.Now()
	err := p.unprepare(ctx, c)
	p.metrics.unprepared(start, err)
	return err
}

func (p *Preparer) unprepare(ctx context.Context, c kubeletplugin.NamespacedObject) error {
	p.calls.stop(c.UID)
	unlock, err := p.claimLocks.Lock(ctx, string(c.UID))
	if err != nil {
		return fmt.Errorf("wait for another operation on the claim: %w", err)
	}
	defer unlock()
	err = p.withdraw(ctx, string(c.UID), func(claim holding.Claim) error { return p.awaitContainers(ctx, c, claim) })
	if errors.Is(err, errGivenUp) {
		return nil
	}
	return err
}

// withdraw removes the spec, and calls await, which deletes the mark (Containers.AwaitEnd) if
// containers may have the claim, and returns nil when none has. Then withdraw removes a mark that
// is left, and daemons and settings that no other claim needs, releases the partitions, and drops
// the record.
func (p *Preparer) withdraw(ctx context.Context, claimUID string, await func(holding.Claim) error) error {
	p.cfg.Journal.AdvancePhase(claimUID, holding.Unpreparing)
	if err := p.cfg.Specs.Remove(claimUID); err != nil {
		return fmt.Errorf("remove the CDI spec of the claim: %w", err)
	}
	p.cfg.Steps.Reached("unprepare.removed")
	c := p.claimOf(claimUID)
	if err := await(c); err != nil {
		return err
	}
	p.cfg.Journal.AdvancePhase(claimUID, holding.Leaving) // not before: its containers need what they share
	if err := p.cfg.Containers.Unmark(claimUID); err != nil {
		return err
	}
	p.cfg.Steps.Reached("unprepare.unmarked")
	if err := p.leaveShared(ctx, c); err != nil {
		return err
	}
	p.cfg.Journal.AdvancePhase(claimUID, holding.Left) // not before: a partition must not be destroyed while a daemon runs on it
	if err := p.release(ctx, c.Record); err != nil {
		return err
	}
	return p.drop(claimUID)
}

// noContainers is the await function for claims that no container can have.
func noContainers(holding.Claim) error { return nil }

// drop removes the record.
func (p *Preparer) drop(claimUID string) error {
	c, _ := p.cfg.Journal.Claim(claimUID)
	if err := p.cfg.Journal.Delete(claimUID); err != nil {
		return err
	}
	p.calls.released()
	p.notifyRead(c)
	p.cfg.Steps.Reached("unprepare.forgotten")
	return nil
}

// undo undoes a first prepare. Results of an earlier prepare of the claim stay:
// a container may be using them. It works even if the call's context has ended.
func (p *Preparer) undo(ctx context.Context, claimUID string, before bool, cause error) error {
	if before {
		return cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWithin)
	defer cancel()
	return errors.Join(cause, p.withdraw(ctx, claimUID, noContainers))
}

// undoWithin bounds the undoing of a prepare whose time may be over.
const undoWithin = 30 * time.Second

// claimOf returns the claim. Of an unreadable record it rebuilds each holding from the
// device's name. The limits are unknown: a share has an empty MPS, every other holding
// none.
func (p *Preparer) claimOf(claimUID string) holding.Claim {
	c, _ := p.cfg.Journal.Claim(claimUID)
	if !c.IsUnreadable() {
		return c
	}
	c.Holdings = slices.Clone(c.Holdings)
	for i, g := range c.Holdings {
		if d, _, _ := p.cfg.Facts.Device(g.Device); d != nil { // also if its GPU doesn't answer
			c.Holdings[i] = holding.New(g.Device, d)
			c.Holdings[i].Request, c.Holdings[i].Admin = g.Request, g.Admin
			if c.Holdings[i].Share != nil {
				c.Holdings[i].MPS = &holding.MPS{} // which every share has
			}
		}
	}
	return c
}

// leaveShared stops the daemons and restores the settings that no remaining claim
// needs. For a claim whose record can't be read these are unknown.
func (p *Preparer) leaveShared(ctx context.Context, c holding.Claim) error {
	if !c.Shares() && !c.IsUnreadable() {
		return nil
	}
	if err := p.cfg.Sharing.Leave(ctx, c.Record); err != nil {
		return fmt.Errorf("stop what the claim shared: %w", err)
	}
	p.cfg.Steps.Reached("unprepare.left")
	return nil
}

// release releases the partitions that the claim holds, but for those that another claim has a
// share of: different GPUs at once, one GPU in order. A failure of one doesn't stop the others;
// errors name the partition.
func (p *Preparer) release(ctx context.Context, r holding.Record) error {
	return agenda.Each(slices.Collect(maps.Values(heldPartitions(r))), func(onGPU []gpu.Partition) error {
		var errs []error
		for _, d := range onGPU {
			errs = append(errs, p.releaseOne(ctx, d))
			p.cfg.Steps.Reached("unprepare.released")
		}
		return errors.Join(errs...)
	})
}

func (p *Preparer) releaseOne(ctx context.Context, d gpu.Partition) error {
	if p.cfg.Journal.ClaimsOn(d.GPU).InUse(d) {
		return nil
	}
	return p.cfg.Partitions.Release(ctx, d)
}

// heldPartitions returns the partitions that the record holds, or holds shares
// of, by GPU.
func heldPartitions(r holding.Record) map[gpu.UUID][]gpu.Partition {
	partitions := map[gpu.UUID][]gpu.Partition{}
	for _, d := range held(r) {
		part, ok := gpu.Base(d).(gpu.Partition)
		if ok && !slices.Contains(partitions[part.GPU], part) {
			partitions[part.GPU] = append(partitions[part.GPU], part)
		}
	}
	return partitions
}

// awaitContainers waits until no process is left of any pod that used the claim. No lock but
// the claim's is held meanwhile.
func (p *Preparer) awaitContainers(ctx context.Context, c kubeletplugin.NamespacedObject, claim holding.Claim) error {
	r := claim.Record
	switch {
	case !claim.IsUnreadable() && (len(held(r)) == 0 || r.BootID != p.cfg.BootID): // admin access holds nothing, and no container survives a boot
		return nil
	case r.GivenUp != nil || p.allLost(r):
		return p.giveUp(ctx, c, claim)
	}
	waiting, cancel := withMargin(ctx)
	defer cancel()
	err := p.cfg.Containers.AwaitEnd(waiting, r.ClaimUID, podsOf(r))
	if err == nil {
		return nil
	}
	err = fmt.Errorf("containers that have the claim's devices (%s) still run on this node, so no other claim gets these yet; this is tried again: %w", describeHoldings(r.Holdings), err)
	p.cfg.Events.WarnClaim(c, reasonInUse, err.Error())
	return err
}

// allLost reports whether all GPUs are lost that the record holds something of.
func (p *Preparer) allLost(r holding.Record) bool {
	return len(held(r)) > 0 && !slices.ContainsFunc(r.Holdings, func(g holding.Holding) bool { return !g.Admin && !p.isLost(g.Device) })
}

func (p *Preparer) isLost(name gpu.DeviceName) bool {
	_, facts, _ := p.cfg.Facts.Device(name) // the error explains the problem
	return slices.ContainsFunc(facts.Conditions, func(c gpu.Condition) bool { return c.Type == gpu.Lost })
}

// podsOf are the pods that the record names.
func podsOf(r holding.Record) []kubeletplugin.NamespacedObject {
	pods := make([]kubeletplugin.NamespacedObject, 0, len(r.Pods))
	for _, pod := range r.Pods {
		pods = append(pods, kubeletplugin.NamespacedObject{
			NamespacedName: types.NamespacedName{Namespace: r.Namespace, Name: pod.Name}, UID: types.UID(pod.UID),
		})
	}
	return pods
}
