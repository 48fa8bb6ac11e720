package prepare

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/claim"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// resolve finds a device that a request was given on this node, with its GPU's
// facts.
func (p *Preparer) resolve(request string, name gpu.DeviceName) (gpu.Device, gpu.GPU, error) {
	d, g, err := p.Inventory.Device(name)
	if err != nil {
		return nil, gpu.GPU{}, fmt.Errorf("request %q was given device %q: %w", request, name, err)
	}
	return d, g, nil
}

// record returns the claim's journal record, from which all else follows. It refuses
// grants that no container could use.
func (p *Preparer) record(c *resourceapi.ResourceClaim, grants []claim.Grant) (holding.Record, error) {
	r := holding.Record{ClaimUID: string(c.UID), Namespace: c.Namespace, Name: c.Name, BootID: p.BootID, Pods: reservedFor(c)}
	placed := make([]claim.Placed, 0, len(grants))
	for _, g := range grants {
		device, facts, err := p.resolve(g.Request, g.Device)
		if err != nil {
			return r, err
		}
		placed = append(placed, claim.Place(g, device, facts))
	}
	if err := claim.SetLimits(placed); err != nil {
		return r, err
	}
	for _, g := range placed {
		grant := holding.Of(g.Device, g.Of)
		grant.Request, grant.Admin, grant.ShareID, grant.TimeSlice = g.Request, g.Admin, g.ShareID, string(g.TimeSlice)
		if g.Limits != nil {
			grant.MPS = &holding.MPS{ThreadPercentage: g.Limits.ThreadPercentage, MemoryMiB: g.Limits.MemoryMiB}
		}
		r.Holdings = append(r.Holdings, grant)
	}
	return r, nil
}

// reservedFor returns the pods that a claim is reserved for.
func reservedFor(c *resourceapi.ResourceClaim) []holding.Pod {
	var pods []holding.Pod
	for _, ref := range c.Status.ReservedFor {
		if ref.APIGroup == corev1.GroupName && ref.Resource == "pods" {
			pods = append(pods, holding.Pod{UID: string(ref.UID), Name: ref.Name})
		}
	}
	return pods
}

// lastRecord returns the claim's record. Of an unreadable record it rebuilds each
// grant from the device's name; its limits are unknown, so MPS is nil.
func (p *Preparer) lastRecord(claimUID string) holding.Record {
	if r, ok := p.Journal.Get(claimUID); ok {
		return r
	}
	for _, u := range p.Journal.Unreadable() {
		if u.ClaimUID != claimUID {
			continue
		}
		r := u.Record
		r.Holdings = slices.Clone(r.Holdings)
		for i, g := range r.Holdings {
			if d, _, err := p.Inventory.Device(g.Device); err == nil {
				r.Holdings[i] = holding.Of(g.Device, d)
				r.Holdings[i].Request, r.Holdings[i].Admin = g.Request, g.Admin
				if r.Holdings[i].Share != nil {
					r.Holdings[i].MPS = &holding.MPS{} // which every share has
				}
			}
		}
		return r
	}
	return holding.Record{ClaimUID: claimUID}
}
