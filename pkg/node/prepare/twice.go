package prepare

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tessera-dra/tessera/pkg/allocator"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// DoubleAllocation is silicon that the scheduler has allocated to two claims, at
// least one of which has a share that can be allocated several times.
type DoubleAllocation struct {
	// Devices that need the same silicon, and their claims as namespace/name.
	Devices [2]gpu.DeviceName
	Claims  [2]string
}

// reportAllocatedTwice reports a double allocation if both claims are allocated now,
// according to the API server: neither is on its way out, and both have had their
// devices since the kubelet read them.
func (p *Preparer) reportAllocatedTwice(ctx context.Context, want, holder holding.Record) {
	devices, ok := sharedTwice(want, holder)
	if !ok {
		return
	}
	for _, r := range []holding.Record{holder, want} {
		standing, err := p.cfg.Holders.Look(ctx, asHolder(r))
		if err != nil || standing.AwaitsUnprepare {
			return // the next refusal reports it, if it is one
		}
	}
	p.cfg.AllocatedTwice(ctx, DoubleAllocation{
		Devices: devices, Claims: [2]string{want.Namespace + "/" + want.Name, holder.Namespace + "/" + holder.Name},
	})
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

// allocatedTwice explains why the scheduler has allocated the same silicon to
// both claims, where one of them has a share that can be allocated several times:
// older schedulers don't charge counters for these. It is empty otherwise.
func allocatedTwice(want, holder holding.Record) string {
	if _, ok := sharedTwice(want, holder); !ok {
		return ""
	}
	return fmt.Sprintf("; schedulers of Kubernetes before %s allocate shares and what overlaps them twice (%s): upgrade the control plane", allocator.Fixed, allocator.Issue)
}

// sharedTwice returns the first device of each record that need the same silicon,
// one of which can be allocated several times.
func sharedTwice(want, holder holding.Record) (_ [2]gpu.DeviceName, ok bool) {
	for _, g := range want.Holdings {
		for _, h := range holder.Holdings {
			if g.Admin || h.Admin {
				continue
			}
			d, e := g.DeviceHeld(), h.DeviceHeld()
			if d != e && gpu.Conflict(d, e) && (isMultiple(d) || isMultiple(e)) {
				return [2]gpu.DeviceName{g.Device, h.Device}, true
			}
		}
	}
	return [2]gpu.DeviceName{}, false
}

// isMultiple reports whether a device can be allocated several times.
func isMultiple(d gpu.Device) bool {
	s, ok := d.(gpu.Share)
	return ok && s.Count == 0
}
