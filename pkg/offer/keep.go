package offer

import (
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/gpu"
)

// keep keeps the devices of claims in the offer. Without counters, it removes
// devices that overlap with them. It removes all other devices if a claim's
// partition has an unknown size, and while a change between shares, replicas
// and other devices isn't complete.
func (s *shelf) keep(names *gpu.Names, allocated []gpu.DeviceName) {
	var have []gpu.Device
	var unknown []string
	for _, name := range allocated {
		d, err := names.Device(name)
		if err != nil || !s.lists(d) {
			unknown = append(unknown, string(name))
			continue
		}
		have = append(have, d)
	}
	if len(unknown) > 0 {
		s.problem("Its MIG tables don't list %s, which a claim has; until the claim is gone, nothing new of it is offered.", strings.Join(unknown, ", "))
	}
	switch {
	case len(unknown) > 0 || s.changing(have):
		s.freeze(have)
	case !s.server.Counters:
		s.withhold(have)
	}
	for _, d := range have {
		s.hold(d)
	}
	s.trim(have)
}

// changing reports whether claims have devices that counters can't separate
// from those of the plan, or that conflict with each other: the scheduler
// allocates nothing of a pool with an overdrawn counter.
func (s *shelf) changing(have []gpu.Device) bool {
	return slices.ContainsFunc(have, func(d gpu.Device) bool {
		return inTheWay(d, have) || !s.offers(d) && (len(s.slots) > 0 || isSlot(d)) || s.escapes(d)
	})
}

// escapes reports whether counters don't see that a claim has the device.
func (s *shelf) escapes(d gpu.Device) bool {
	share, ok := d.(gpu.Share)
	if !ok || share.Count > 0 || !s.server.Multiple || s.charged() {
		return false
	}
	_, ofPartition := share.Of.(gpu.Partition)
	return ofPartition
}

// isSlot says whether a device is one of those that are never among parts.
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

// offers says whether the device is on the shelf.
func (s *shelf) offers(d gpu.Device) bool {
	_, whole := d.(gpu.Whole)
	return whole && (s.whole || s.wholeLeft) ||
		slices.ContainsFunc(s.parts, func(p part) bool { return p.device() == d }) ||
		slices.ContainsFunc(s.slots, func(x slot) bool { return x.device == d })
}

// freeze removes all devices that no claim has. A device that conflicts with
// another claim's device must not be allocated again either.
func (s *shelf) freeze(have []gpu.Device) {
	s.frozen = true
	if whole := gpu.Device(gpu.Whole{GPU: s.g.UUID}); !slices.Contains(have, whole) || inTheWay(whole, have) {
		s.whole = false
	}
	s.parts = slices.DeleteFunc(s.parts, func(p part) bool { return !slices.Contains(have, p.device()) })
	s.slots = slices.DeleteFunc(s.slots, func(x slot) bool { return !slices.Contains(have, x.device) })
	for i := range s.parts {
		s.parts[i].leftover = inTheWay(s.parts[i].device(), have)
	}
	for i := range s.slots {
		s.slots[i].leftover = inTheWay(s.slots[i].device, have)
	}
}

// hold puts a device that a claim has on the shelf, if it isn't there.
func (s *shelf) hold(d gpu.Device) {
	if s.offers(d) {
		return
	}
	at, ofPartition := gpu.Base(d).(gpu.Partition)
	switch {
	case isSlot(d):
		s.slots = append(s.slots, slot{device: d, leftover: true})
	case ofPartition:
		_, shared := d.(gpu.Share)
		p, _ := s.profile(at.Profile)
		s.parts = append(s.parts, part{Partition: at, profile: p, shared: shared, leftover: true})
	default:
		s.wholeLeft = true
	}
}

// isExisting reports whether others made a partition.
func (s *shelf) isExisting(d gpu.Partition) bool {
	return slices.ContainsFunc(s.parts, func(p part) bool { return p.Partition == d && p.exists })
}

// withhold removes devices that overlap with those of claims, or need more
// engines than they leave free.
func (s *shelf) withhold(allocated []gpu.Device) {
	s.whole = s.whole && !inTheWay(gpu.Whole{GPU: s.g.UUID}, allocated)
	r := s.room
	for _, a := range allocated {
		if d, ok := gpu.Base(a).(gpu.Partition); ok && !s.isExisting(d) {
			if p, ok := s.profile(d.Profile); ok {
				r = r.without(p, d.Placement)
			}
		}
	}
	s.parts = slices.DeleteFunc(s.parts, func(p part) bool {
		if inTheWay(p.device(), allocated) {
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

// inTheWay says whether a device and another one that claims have can't be had
// at once.
func inTheWay(d gpu.Device, allocated []gpu.Device) bool {
	return slices.ContainsFunc(allocated, func(a gpu.Device) bool { return a != d && gpu.Conflict(a, d) })
}

// trim takes off the last parts that no claim has, where there are more than a
// ResourceSlice has room for: no product has so many.
func (s *shelf) trim(have []gpu.Device) {
	n := len(s.parts) + len(s.slots) + 1 - maxCounted
	if n <= 0 || len(s.parts) == 0 {
		return
	}
	s.parts = inOrder(s.mig, s.parts)
	for i, p := range slices.Backward(s.parts) {
		if n > 0 && !slices.Contains(have, p.device()) {
			s.parts = slices.Delete(s.parts, i, i+1)
			n--
		}
	}
}
