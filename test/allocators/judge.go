package allocators

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/offer"
)

// OverlapError is the error that two claims have the same silicon.
type OverlapError struct{ A, B gpu.Device }

// Error names the devices.
func (o *OverlapError) Error() string { return fmt.Sprintf("claims have %v and %v", o.A, o.B) }

// OfShares reports whether one of the devices can be allocated several times.
func (o *OverlapError) OfShares() bool { return isForSeveral(o.A) || isForSeveral(o.B) }

func isForSeveral(d gpu.Device) bool {
	s, ok := d.(gpu.Share)
	return ok && s.Count == 0
}

// Judge returns an error if two claims have the same silicon (*OverlapError), or claims
// have more memory of a shared device than there is.
func (c *Cluster) Judge() error {
	names, err := gpu.NewNames(c.Node.GPUs)
	if err != nil {
		return err
	}
	var errs []error
	var held []gpu.Device
	shared := make(map[gpu.Device]int64)
	for _, r := range c.allocated() {
		d, err := names.Device(gpu.DeviceName(r.Device))
		if err != nil {
			return err
		}
		for _, h := range held {
			if gpu.Conflict(d, h) {
				errs = append(errs, &OverlapError{d, h})
			}
		}
		held = append(held, d)
		if memory, ok := r.ConsumedCapacity[gpu.MemoryCapacity]; ok {
			shared[gpu.Base(d)] += memory.Value() >> 20
		}
	}
	for d, mib := range shared {
		if there, err := gpu.ShareableMiB(c.gpu(d.Parent()), d); err != nil || mib > there {
			errs = append(errs, fmt.Errorf("claims have %d MiB of %v, which has %d: %w", mib, d, there, err))
		}
	}
	return errors.Join(errs...)
}

func (c *Cluster) gpu(u gpu.UUID) gpu.GPU {
	return c.Node.GPUs[slices.IndexFunc(c.Node.GPUs, func(g gpu.GPU) bool { return g.UUID == u })]
}

// JudgeOffer returns an error if the controller would stop offering a device that
// a claim has, or publish a counter of which claims have more than there is: that
// would keep the scheduler from allocating anything else of the pool.
func (c *Cluster) JudgeOffer() error {
	var errs []error
	missing := make(map[string]bool)
	for _, r := range c.allocated() {
		missing[r.Device] = true
	}
	held := maps.Clone(missing)
	for _, g := range c.Offer() {
		for _, d := range g.Devices {
			delete(missing, d.Name)
		}
		errs = append(errs, checkCounters(g, held))
	}
	for name := range missing {
		errs = append(errs, fmt.Errorf("%s isn't offered any more", name))
	}
	return errors.Join(errs...)
}

func checkCounters(g offer.GPU, held map[string]bool) error {
	if g.Counters == nil {
		return nil
	}
	left := make(map[string]int64)
	for name, c := range g.Counters.Counters {
		left[name] = c.Value.Value()
	}
	for _, d := range g.Devices {
		if !held[d.Name] {
			continue
		}
		consume(d, left)
	}
	for name, n := range left {
		if n < 0 {
			return fmt.Errorf("there is %d left of counter %s of %s", n, name, g.Name)
		}
	}
	return nil
}

func consume(d resourceapi.Device, left map[string]int64) {
	for _, u := range d.ConsumesCounters {
		for name, c := range u.Counters {
			left[name] -= c.Value.Value()
		}
	}
}
