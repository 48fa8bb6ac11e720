package offer

import (
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// keepAllocated keeps the devices of claims in the offer. Without counters, it removes
// devices that overlap with them. It removes all other devices if a claim's
// partition has an unknown size, and while a change between shares, replicas
// and other devices isn't complete.
func (o *draft) keepAllocated(names *gpu.Names, allocated []gpu.DeviceName) {
	var have []gpu.Device
	var unknown []string
	for _, name := range allocated {
		d, err := names.Device(name)
		if err != nil || !o.isListed(d) {
			unknown = append(unknown, string(name))
			continue
		}
		have = append(have, d)
	}
	if len(unknown) > 0 {
		o.problem("Its MIG tables don't list %s, which a claim has; until the claim is gone, nothing new of it is offered.", strings.Join(unknown, ", "))
	}
	switch {
	case len(unknown) > 0 || o.isChanging(have):
		o.freeze(have)
	case !o.server.Counters:
		o.removeOverlaps(have)
	}
	for _, d := range have {
		o.addAllocated(d)
	}
	o.trim(have)
}

// isChanging reports whether claims have devices that counters can't separate
// from those of the plan, or that conflict with each other: the scheduler
// allocates nothing of a pool with an overdrawn counter.
func (o *draft) isChanging(have []gpu.Device) bool {
	return slices.ContainsFunc(have, func(d gpu.Device) bool {
		return conflictsWithAny(d, have) || !o.has(d) && (len(o.slots) > 0 || isSlot(d)) || o.escapesCounters(d)
	})
}

// escapesCounters reports whether counters don't see that a claim has the device.
func (o *draft) escapesCounters(d gpu.Device) bool {
	share, ok := d.(gpu.Share)
	if !ok || share.Count > 0 || !o.server.Multiple || o.charged() {
		return false
	}
	_, ofPartition := share.Of.(gpu.Partition)
	return ofPartition
}

// isSlot reports whether a device is one of those that are never among parts.
func isSlot(d gpu.Device) bool {
	switch d := d.(type) {
	case gpu.Share:
		_, ofPartition := d.Of.(gpu.Partition)
		return !ofPartition || d.Count > 0
	case gpu.Replica:
		return true
	case gpu.Whole, gpu.Partition:
	}
	return false
}

// has reports whether the draft has the device.
func (o *draft) has(d gpu.Device) bool {
	_, whole := d.(gpu.Whole)
	return whole && (o.whole || o.wholeLeft) ||
		slices.ContainsFunc(o.parts, func(p part) bool { return p.device() == d }) ||
		slices.ContainsFunc(o.slots, func(x slot) bool { return x.device == d })
}

// freeze removes all devices that no claim has. A device that conflicts with
// another claim's device must not be allocated again either.
func (o *draft) freeze(have []gpu.Device) {
	o.frozen = true
	if whole := gpu.Device(gpu.Whole{GPU: o.g.UUID}); !slices.Contains(have, whole) || conflictsWithAny(whole, have) {
		o.whole = false
	}
	o.parts = slices.DeleteFunc(o.parts, func(p part) bool { return !slices.Contains(have, p.device()) })
	o.slots = slices.DeleteFunc(o.slots, func(x slot) bool { return !slices.Contains(have, x.device) })
	for i := range o.parts {
		o.parts[i].leftover = conflictsWithAny(o.parts[i].device(), have)
	}
	for i := range o.slots {
		o.slots[i].leftover = conflictsWithAny(o.slots[i].device, have)
	}
}

// addAllocated adds a device that a claim has, if the draft doesn't have it.
func (o *draft) addAllocated(d gpu.Device) {
	if o.has(d) {
		return
	}
	at, ofPartition := gpu.Base(d).(gpu.Partition)
	switch {
	case isSlot(d):
		o.slots = append(o.slots, slot{device: d, leftover: true})
	case ofPartition:
		_, shared := d.(gpu.Share)
		p, _ := o.profileNamed(at.Profile)
		o.parts = append(o.parts, part{Partition: at, profile: p, shared: shared, leftover: true})
	default:
		o.wholeLeft = true
	}
}

// isExisting reports whether others made a partition.
func (o *draft) isExisting(d gpu.Partition) bool {
	return slices.ContainsFunc(o.parts, func(p part) bool { return p.Partition == d && p.exists })
}

// removeOverlaps removes devices that overlap with those of claims, or need more
// engines than they leave free.
func (o *draft) removeOverlaps(allocated []gpu.Device) {
	o.whole = o.whole && !conflictsWithAny(gpu.Whole{GPU: o.g.UUID}, allocated)
	r := o.room
	for _, a := range allocated {
		if d, ok := gpu.Base(a).(gpu.Partition); ok && !o.isExisting(d) {
			if p, ok := o.profileNamed(d.Profile); ok {
				r = r.without(p, d.Placement)
			}
		}
	}
	o.parts = slices.DeleteFunc(o.parts, func(p part) bool {
		if conflictsWithAny(p.device(), allocated) {
			return true
		}
		if p.exists || slices.Contains(allocated, p.device()) {
			return false
		}
		if !r.has(p.profile, p.Placement) {
			return true
		}
		r = r.without(p.profile, p.Placement)
		return false
	})
}

// conflictsWithAny reports whether a device and another one that claims have can't be had
// at once.
func conflictsWithAny(d gpu.Device, allocated []gpu.Device) bool {
	return slices.ContainsFunc(allocated, func(a gpu.Device) bool { return a != d && gpu.Conflict(a, d) })
}

// trim takes off the last parts that no claim has, where there are more than a
// ResourceSlice has room for: no product has so many.
func (o *draft) trim(have []gpu.Device) {
	n := len(o.parts) + len(o.slots) + 1 - maxCounted
	if n <= 0 || len(o.parts) == 0 {
		return
	}
	o.parts = inOrder(o.mig, o.parts)
	for i, p := range slices.Backward(o.parts) {
		if n > 0 && !slices.Contains(have, p.device()) {
			o.parts = slices.Delete(o.parts, i, i+1)
			n--
		}
	}
}
