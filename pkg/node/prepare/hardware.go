package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/journal"
)

// realize has the hardware make what the grants of a recorded claim are of:
// different GPUs at once, one GPU in order. On an error, what was made stays.
func (p *Preparer) realize(ctx context.Context, grants []journal.Grant) (map[gpu.DeviceName]gpu.Given, error) {
	given := make(map[gpu.DeviceName]gpu.Given, len(grants))
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	for _, grants := range byGPU(grants) {
		group.Go(func() error {
			for _, g := range grants {
				if err := context.Cause(ctx); err != nil {
					return err // nobody waits for the rest any more
				}
				instance, err := p.realizeOne(ctx, g)
				if err != nil {
					return fmt.Errorf("device %q for request %q: %w", g.Device, g.Request, err)
				}
				mu.Lock()
				given[g.Device] = gpu.Given{Device: g.Of(), Instance: instance}
				mu.Unlock()
				p.Step("prepare.made")
			}
			return nil
		})
	}
	return given, group.Wait()
}

// realizeOne returns the instance that a partition is; zero for a whole GPU.
func (p *Preparer) realizeOne(ctx context.Context, g journal.Grant) (gpu.Instance, error) {
	switch d := g.Of().(type) {
	case gpu.Whole:
		if g.Admin {
			return gpu.Instance{}, nil
		}
		return gpu.Instance{}, p.Partitions.Whole(ctx, d.GPU)
	case gpu.Partition:
		if g.Admin {
			return p.Partitions.Find(ctx, d)
		}
		return p.Partitions.Make(ctx, d)
	default:
		return gpu.Instance{}, fmt.Errorf("%T is no device this version knows", d)
	}
}

// byGPU returns each granted device once, by GPU; on a GPU those that are held
// come first, because an administrator may look at what the same claim holds.
func byGPU(grants []journal.Grant) map[gpu.UUID][]journal.Grant {
	devices := map[gpu.UUID][]journal.Grant{}
	for _, admin := range []bool{false, true} {
		for _, g := range grants {
			of := devices[g.GPU]
			same := func(other journal.Grant) bool { return other.Device == g.Device }
			if g.Admin == admin && !slices.ContainsFunc(of, same) {
				devices[g.GPU] = append(of, g)
			}
		}
	}
	return devices
}

// release gives up the partitions that the claim holds: different GPUs at
// once, one GPU in order. What one of them runs into stops none of the others;
// errors name the partition.
func (p *Preparer) release(ctx context.Context, claimUID string) error {
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	for _, partitions := range p.heldPartitions(claimUID) {
		wg.Go(func() {
			for _, d := range partitions {
				if err := p.Partitions.Release(ctx, d); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
				p.Step("unprepare.released")
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// heldPartitions returns the partitions that the claim's record holds, by GPU.
// Of a record that can't be read, device names are all there is to go by; what
// they don't tell is found when nothing holds it any more.
func (p *Preparer) heldPartitions(claimUID string) map[gpu.UUID][]gpu.Partition {
	partitions := map[gpu.UUID][]gpu.Partition{}
	add := func(d gpu.Device) {
		part, ok := d.(gpu.Partition)
		if ok && !slices.Contains(partitions[part.GPU], part) {
			partitions[part.GPU] = append(partitions[part.GPU], part)
		}
	}
	if r, ok := p.Journal.Get(claimUID); ok {
		for _, d := range held(r) {
			add(d)
		}
		return partitions
	}
	for _, u := range p.Journal.Unreadable() {
		for _, g := range u.Record.Grants {
			if u.ClaimUID != claimUID || g.Admin {
				continue
			}
			if d, _, err := p.Inventory.Device(g.Device); err == nil {
				add(d)
			}
		}
	}
	return partitions
}

// hasPartitions says whether the record has any, held or looked at.
func hasPartitions(r journal.Record) bool {
	return slices.ContainsFunc(r.Grants, func(g journal.Grant) bool { return g.Partition != journal.Partition{} })
}
