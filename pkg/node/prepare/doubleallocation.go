package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/api/gpu/v1alpha1"
	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// doubleAllocation is silicon that the scheduler has allocated to two claims: two
// different devices that only shared counters keep apart.
type doubleAllocation struct {
	// refused is the claim that wasn't prepared, because holder had been.
	refused, holder allocatedDevice
}

// allocatedDevice is one of the two devices of a double allocation, with its claim.
type allocatedDevice struct {
	claim  holding.Record
	device gpu.DeviceName
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
		s, err := p.readStanding(ctx, r)
		if err != nil || s.awaitsUnprepare {
			return // the next refusal reports it, if it is one
		}
	}
	err := p.writeDoubleAllocation(ctx, d)
	if err == nil {
		err = p.recordRefused(ctx, holder.ClaimUID, want.ClaimUID)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "A double allocation is reported again at the next refusal",
			"claim", klog.KRef(want.Namespace, want.Name), "holder", klog.KRef(holder.Namespace, holder.Name))
	}
}

// serverPatience is how long the API server has to take in a double allocation.
const serverPatience = 5 * time.Second

// writeDoubleAllocation writes a double allocation to the node's GPUInventory. The controller
// stops using the node's counters for it while the API server has this version.
func (p *Preparer) writeDoubleAllocation(ctx context.Context, d doubleAllocation) error {
	ctx, cancel := context.WithTimeout(ctx, serverPatience)
	defer cancel()
	info, err := p.cfg.Version.ServerVersionWithContext(ctx)
	if err == nil && info.GitVersion == "" {
		err = errors.New("the server doesn't say it")
	}
	if err != nil {
		return fmt.Errorf("read the API server's version: %w", err)
	}
	message := d.describe(info.GitVersion)
	if err := p.cfg.Reporter.ReportDoubleAllocation(ctx, info.GitVersion, message); err != nil {
		return err
	}
	klog.FromContext(ctx).Error(nil, "The scheduler allocated the same silicon to two claims", "kubernetes", info.GitVersion,
		"refused", klog.KRef(d.refused.claim.Namespace, d.refused.claim.Name), "refusedDevice", d.refused.device,
		"holder", klog.KRef(d.holder.claim.Namespace, d.holder.claim.Name), "holderDevice", d.holder.device)
	p.cfg.Events.OnNode(corev1.EventTypeWarning, v1alpha1.ConditionDoubleAllocation, message)
	return nil
}

// describe names both claims with their devices and pods, and the consequence.
func (d doubleAllocation) describe(kubernetes string) string {
	one := func(a allocatedDevice) string {
		text := fmt.Sprintf("%s to claim %s/%s", a.device, a.claim.Namespace, a.claim.Name)
		if len(a.claim.Pods) > 0 {
			text += " of pod " + a.claim.Pods[0].Name
		}
		return text
	}
	return fmt.Sprintf("A scheduler of the cluster, which seems to be older than the API server, allocated %s, and %s, which the node refuses because they overlap. "+
		"While the API server is Kubernetes %s, nothing of the node that needs shared counters (MIG partitions on demand, whole GPUs beside shares) is offered to other claims.",
		one(d.holder), one(d.refused), kubernetes)
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

// explainDoubleAllocation says why the scheduler may have allocated the same silicon to
// both claims. It is empty where an older scheduler doesn't explain that.
func explainDoubleAllocation(want, holder holding.Record) string {
	d, ok := findDoubleAllocation(want, holder)
	switch {
	case !ok:
		return ""
	case d.refused.device.AllowsMultipleAllocations() || d.holder.device.AllowsMultipleAllocations():
		return fmt.Sprintf("; schedulers of Kubernetes before %s allocate shares and what overlaps them twice (%s): upgrade the control plane",
			allocator.Fixed, allocator.Issue)
	}
	return "; a scheduler that is older than the API server may not read the counters that keep these devices apart: upgrade all schedulers"
}

// findDoubleAllocation returns the first two different devices of the claims that need
// the same silicon.
func findDoubleAllocation(want, holder holding.Record) (_ doubleAllocation, ok bool) {
	for _, g := range want.Holdings {
		for _, h := range holder.Holdings {
			if g.Admin || h.Admin {
				continue
			}
			if d, e := g.Of(), h.Of(); d != e && gpu.Conflict(d, e) {
				return doubleAllocation{
					refused: allocatedDevice{claim: want, device: g.Device}, holder: allocatedDevice{claim: holder, device: h.Device},
				}, true
			}
		}
	}
	return doubleAllocation{}, false
}
