package prepare

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// DoubleAllocation is silicon that the scheduler has allocated to two claims: two
// different devices that only shared counters keep apart.
type DoubleAllocation struct {
	// Refused is the claim that wasn't prepared, because Holder had been.
	Refused, Holder AllocatedDevice
}

// AllocatedDevice is one of the two devices of a double allocation, with its claim.
type AllocatedDevice struct {
	Claim  holding.Record
	Device gpu.DeviceName
}

// reportDoubleAllocation reports a double allocation, once for each two claims, if
// both are allocated now, according to the API server: neither is on its way out, and
// both have had their devices since the kubelet read them.
func (p *Preparer) reportDoubleAllocation(ctx context.Context, want, holder holding.Record) {
	d, ok := findDoubleAllocation(want, holder)
	if !ok || slices.Contains(holder.RefusedClaims, want.ClaimUID) {
		return
	}
	for _, r := range []holding.Record{holder, want} {
		standing, err := p.cfg.Holders.Look(ctx, asHolder(r))
		if err != nil || standing.AwaitsUnprepare {
			return // the next refusal reports it, if it is one
		}
	}
	err := p.cfg.ReportDoubleAllocation(ctx, d)
	if err == nil {
		err = p.recordRefused(ctx, holder.ClaimUID, want.ClaimUID)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "A double allocation is reported again at the next refusal",
			"claim", klog.KRef(want.Namespace, want.Name), "holder", klog.KRef(holder.Namespace, holder.Name))
	}
}

// maxRefused bounds how many refused claims a record lists.
const maxRefused = 32

// recordRefused notes in the holder's record that the other claim's double allocation
// with it is reported, so that it isn't again, however often the kubelet retries and
// whatever became of the report.
func (p *Preparer) recordRefused(ctx context.Context, holderUID, refusedUID string) error {
	unlock, err := p.claimLocks.Lock(ctx, holderUID)
	if err != nil {
		return fmt.Errorf("wait for another operation on the holder: %w", err)
	}
	defer unlock()
	c, ok := p.cfg.Journal.Claim(holderUID)
	if !ok || c.IsUnreadable() {
		return nil
	}
	r := c.Record
	r.RefusedClaims = append(slices.Clone(r.RefusedClaims), refusedUID)
	r.RefusedClaims = r.RefusedClaims[max(0, len(r.RefusedClaims)-maxRefused):]
	return p.cfg.Journal.Put(r)
}

// asHolder returns the claim of a record as the cluster is asked about it.
func asHolder(r holding.Record) Holder {
	h := Holder{UID: types.UID(r.ClaimUID), Namespace: r.Namespace, Name: r.Name}
	for _, g := range r.Holdings {
		if !g.Admin {
			h.Devices = append(h.Devices, g.Device)
		}
	}
	return h
}

// explainDoubleAllocation says why the scheduler may have allocated the same silicon to
// both claims. It is empty where an older scheduler doesn't explain that.
func explainDoubleAllocation(want, holder holding.Record) string {
	d, ok := findDoubleAllocation(want, holder)
	switch {
	case !ok:
		return ""
	case d.Refused.Device.AllowsMultipleAllocations() || d.Holder.Device.AllowsMultipleAllocations():
		return fmt.Sprintf("; schedulers of Kubernetes before %s allocate shares and what overlaps them twice (%s): upgrade the control plane",
			allocator.Fixed, allocator.Issue)
	}
	return "; a scheduler that is older than the API server may not read the counters that keep these devices apart: upgrade all schedulers"
}

// findDoubleAllocation returns the first two different devices of the claims that need
// the same silicon.
func findDoubleAllocation(want, holder holding.Record) (_ DoubleAllocation, ok bool) {
	for _, g := range want.Holdings {
		for _, h := range holder.Holdings {
			if g.Admin || h.Admin {
				continue
			}
			if d, e := g.DeviceHeld(), h.DeviceHeld(); d != e && gpu.Conflict(d, e) {
				return DoubleAllocation{
					Refused: AllocatedDevice{Claim: want, Device: g.Device}, Holder: AllocatedDevice{Claim: holder, Device: h.Device},
				}, true
			}
		}
	}
	return DoubleAllocation{}, false
}
