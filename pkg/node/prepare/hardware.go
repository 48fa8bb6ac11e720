package prepare

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
)

// readyDevices makes the silicon of a recorded claim's devices ready: it creates partitions, and
// switches MIG mode off on GPUs that the claim has whole. On an error, the created parts stay.
func (p *Preparer) readyDevices(ctx context.Context, r holding.Record) (holding.Realized, error) {
	realized := holding.Realized{Record: r}
	err := p.awaitDaemonEnds(ctx, r)
	if err != nil {
		return realized, failedAt(ctx, stepSharing, err)
	}
	if realized.Instances, err = p.readyAll(ctx, r.Holdings); err != nil {
		return realized, failedAt(ctx, stepHardware, err)
	}
	p.cfg.Steps.Reached("prepare.ready")
	return realized, nil
}

// awaitDaemonEnds waits for the ends of MPS daemons on GPUs that the claim is to have
// partitions of: they are in the way of a change of the MIG mode.
func (p *Preparer) awaitDaemonEnds(ctx context.Context, r holding.Record) error {
	for _, g := range r.Holdings {
		if g.Admin || g.Partition == (holding.Partition{}) {
			continue
		}
		if err := p.cfg.Sharing.AwaitDaemonEnds(ctx, g.GPU); err != nil {
			return fmt.Errorf("wait for the end of what claims shared the GPU through: %w", err)
		}
	}
	return nil
}

// readyAll makes the silicon of the holdings ready, and returns the instances of partitions:
// different GPUs at once, one GPU in order. What the hardware refuses is tried twice.
func (p *Preparer) readyAll(ctx context.Context, holdings []holding.Holding) (map[gpu.Partition]gpu.Instance, error) {
	made := make(chan map[gpu.Partition]gpu.Instance, len(holdings))
	group, ctx := errgroup.WithContext(ctx)
	for _, onGPU := range byGPU(holdings) {
		group.Go(func() error {
			instances := map[gpu.Partition]gpu.Instance{}
			for _, g := range onGPU {
				if err := context.Cause(ctx); err != nil {
					return err // the caller no longer waits for the rest
				}
				instance, err := p.readyDevice(ctx, g)
				if err != nil {
					if err = awaitSecondTry(ctx, err); err == nil {
						instance, err = p.readyDevice(ctx, g)
					}
				}
				if err != nil {
					return fmt.Errorf("device %q for request %q: %w", g.Device, g.Request, err)
				}
				if part, ok := g.Base().(gpu.Partition); ok {
					instances[part] = instance
				}
				p.cfg.Steps.Reached("prepare.made")
			}
			made <- instances
			return nil
		})
	}
	err := group.Wait()
	close(made)
	all := map[gpu.Partition]gpu.Instance{}
	for instances := range made {
		maps.Copy(all, instances)
	}
	return all, err
}

// tryAgainAfter is the pause before the second attempt at what the hardware has refused: a program
// that only looks at the GPU, such as a monitor, may have kept it from being changed.
const tryAgainAfter = 250 * time.Millisecond

// awaitSecondTry returns nil when it is time for a second attempt at what has failed, if the hardware
// has refused it; otherwise err. One refusal says little: if the call ends before the second attempt,
// the error isn't a refusal.
func awaitSecondTry(ctx context.Context, err error) error {
	if _, refused := errors.AsType[*gpu.RefusedError](err); !refused {
		return err
	}
	select {
	case <-time.After(tryAgainAfter):
		return nil
	case <-ctx.Done():
		return fmt.Errorf("try a second time after %q: %w", err.Error(), context.Cause(ctx))
	}
}

// readyDevice creates the partition and returns its instance; of a whole GPU it clears
// MIG and returns the zero Instance. Admin access changes nothing.
func (p *Preparer) readyDevice(ctx context.Context, g holding.Holding) (gpu.Instance, error) {
	switch d := g.Base().(type) {
	case gpu.Whole:
		if g.Admin {
			return gpu.Instance{}, nil
		}
		return gpu.Instance{}, p.cfg.Partitions.ClearMIG(ctx, d.GPU)
	case gpu.Partition:
		if g.Admin {
			return p.cfg.Partitions.Find(ctx, d)
		}
		return p.cfg.Partitions.Ensure(ctx, d)
	case gpu.Share, gpu.Replica:
		return gpu.Instance{}, fmt.Errorf("%T is no silicon", d)
	default:
		return gpu.Instance{}, fmt.Errorf("%T is no device this version knows", d)
	}
}

// setUpSharing sets up daemons and settings of a claim that is being prepared, if it shares
// anything. before: containers may have the claim.
func (p *Preparer) setUpSharing(ctx context.Context, realized holding.Realized, before bool) (map[string]gpu.MPSDirs, error) {
	if !realized.Shares() {
		return nil, nil //nolint:nilnil // no daemons
	}
	dirs, err := p.cfg.Sharing.JoinPatiently(ctx, realized.Record, realized.Instances, !before)
	if err != nil {
		return nil, failedAt(ctx, stepSharing, fmt.Errorf("set up what the claim shares: %w", err))
	}
	p.cfg.Steps.Reached("prepare.joined")
	return dirs, nil
}

// ensureUnshared ensures that the GPUs that the claim has to itself are as they were
// before others shared them: a setting that could not be restored when those left
// would affect the claim's processes.
func (p *Preparer) ensureUnshared(ctx context.Context, r holding.Record) error {
	if r.Shares() { // its GPUs were joined
		return nil
	}
	var alone []gpu.UUID
	for _, g := range r.Holdings {
		if !g.Admin && g.Of() == gpu.Device(gpu.Whole{GPU: g.GPU}) {
			alone = append(alone, g.GPU)
		}
	}
	if len(alone) == 0 {
		return nil
	}
	err := p.cfg.Sharing.EnsureUnshared(ctx, alone...)
	if err != nil {
		if err = awaitSecondTry(ctx, err); err == nil {
			err = p.cfg.Sharing.EnsureUnshared(ctx, alone...)
		}
	}
	if err != nil {
		return fmt.Errorf("wait until claims that shared the GPU have left it as it was: %w", err)
	}
	return nil
}

// byGPU returns one holding of each silicon, by GPU. On a GPU those that are held come first,
// because an administrator may look at what the same claim holds.
func byGPU(holdings []holding.Holding) map[gpu.UUID][]holding.Holding {
	silicon := map[gpu.UUID][]holding.Holding{}
	for _, admin := range []bool{false, true} {
		for _, g := range holdings {
			of := silicon[g.GPU]
			same := func(other holding.Holding) bool { return other.Base() == g.Base() }
			if g.Admin == admin && !slices.ContainsFunc(of, same) {
				silicon[g.GPU] = append(of, g)
			}
		}
	}
	return silicon
}
