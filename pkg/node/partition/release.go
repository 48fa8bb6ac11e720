package partition

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// modeLinger is how long MIG mode stays on after the last partition of ours is
// gone: switching it takes seconds, and the next claim may want one again.
const modeLinger = 5 * time.Second

// limits are what tidy leaves.
type limits struct {
	// keepWarm is the time for which partitions without a claim may stay.
	keepWarm time.Duration
	// linger is how long MIG mode may stay on without a partition of ours.
	linger time.Duration
}

func (v *visit) release(ctx context.Context, p gpu.Partition) error {
	err := v.lookForRelease(ctx)
	if errors.Is(err, nvml.ErrNotResponding) {
		v.m.worker.Failed(v.uuid)
		return err // processes may still be in the partition; the GPU comes back, or is lost
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "A MIG partition isn't needed any more, but the GPU can't be reached; it is destroyed when it can", "gpu", v.uuid, "profile", p.Profile, "start", p.Placement.Start)
		v.m.worker.Failed(v.uuid)
		return nil
	}
	defer v.plan()
	if v.m.cfg.Journal.Claims().InUse(p) { // somebody else has a share of it, or has it again by now
		v.m.setIdle(p, false)
		return v.save()
	}
	o, ok := v.findOwn(p)
	if ok && o.whole() && v.m.keep(v.uuid) > 0 {
		v.m.setIdle(p, true)
		return v.save()
	}
	if ok {
		if err := v.destroy(ctx, o); err != nil {
			return err
		}
	}
	if err := v.save(); err != nil {
		return err
	}
	v.m.cfg.Step("partition.forgotten")
	return nil
}

func (v *visit) lookForRelease(ctx context.Context) error {
	if v.hw == nil {
		return gpu.ErrNoDriver
	}
	return v.look(ctx)
}

// tidy destroys incomplete partitions, and those idle for longer than the
// limits allow, and then switches the mode off.
func (v *visit) tidy(ctx context.Context, l limits) error {
	if r, ok := v.m.cfg.Journal.GPU(v.uuid); ok && r.BootID != v.m.cfg.BootID {
		return v.m.cfg.Journal.DeleteGPU(v.uuid) // the hardware has forgotten, whether or not the GPU is still there
	}
	if err := v.look(ctx); err != nil {
		return err
	}
	if err := v.readable(); err != nil {
		return err
	}
	if err := errors.Join(v.destroyIdle(ctx, l.keepWarm), v.save()); err != nil {
		return err
	}
	if v.switched && len(v.ours)+len(v.others) == 0 && v.m.emptyFor(v.uuid) >= l.linger {
		if err := errors.Join(v.switchMode(ctx, false), v.save()); err != nil {
			return err
		}
	}
	v.plan()
	return nil
}

// destroyIdle destroys incomplete partitions, and those that have been idle for
// that long.
func (v *visit) destroyIdle(ctx context.Context, keepWarm time.Duration) error {
	var errs []error
	for _, o := range slices.Clone(v.ours) {
		if o.whole() && (v.m.holder(o.Partition) != "" || v.m.idleFor(o.Partition) < keepWarm) {
			continue
		}
		errs = append(errs, v.destroy(ctx, o))
	}
	return errors.Join(errs...)
}

// idle returns those of ours that no claim holds, the longest idle first.
func (v *visit) idle() []own {
	var idle []own
	for _, o := range v.ours {
		if o.instance != nil && v.m.holder(o.Partition) == "" {
			idle = append(idle, o)
		}
	}
	slices.SortStableFunc(idle, func(a, b own) int { return int(v.m.idleFor(b.Partition) - v.m.idleFor(a.Partition)) })
	return idle
}
