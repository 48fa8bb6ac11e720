package partition

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/agenda"
	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// modeLinger is how long MIG mode stays on after the last partition of ours is
// gone: switching it takes seconds, and the next claim may want one again.
const modeLinger = 5 * time.Second

// Release says that the claim which had the partition, or a share of it, uses it no
// more, and neither does a daemon for it (holding.Left); its record is
// deleted after it. One of ours is destroyed, or stays warm. One that others made, or that
// is in use (holding.Claims.InUse), stays. Idempotent. While processes use the instance it
// is an error that names them; while the GPU doesn't respond it is an error. Where
// the GPU is lost, or there is no driver, the partition counts as idle from then
// on, and is destroyed when it can be.
func (m *Manager) Release(ctx context.Context, p gpu.Partition) (err error) {
	defer wrap(&err, "release %s", named(p))
	v, err := m.visit(ctx, "release", p.GPU)
	if err != nil {
		return err
	}
	defer v.end(&err)
	if err := v.lookForRelease(); err != nil {
		m.worker.Failed(v.uuid)
		if errors.Is(err, nvml.ErrNotResponding) {
			return err // processes may still be in the partition; the GPU comes back, or is lost
		}
		klog.FromContext(ctx).Error(err, "A MIG partition isn't needed any more, but the GPU can't be reached; it is destroyed when it can", "gpu", v.uuid, "profile", p.Profile, "start", p.Placement.Start)
		return nil
	}
	defer v.schedule()
	if m.cfg.Journal.ClaimsOn(p.GPU).InUse(p) { // somebody else has a share of it, or has it again by now
		v.setIdle(p, false)
		return v.save()
	}
	o, ok := v.findOwn(p)
	if ok && o.complete() && m.keep(v.uuid) > 0 {
		v.setIdle(p, true)
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
	m.cfg.Steps.Reached("partition.forgotten")
	return nil
}

func (v *visit) lookForRelease() error {
	if v.hw == nil {
		return gpu.ErrNoDriver
	}
	return v.look()
}

// Recover makes hardware and records agree. It completes a partition that a crash left
// incomplete if a claim holds it, and destroys it if it can't. It destroys partitions
// that no claim holds, unless SetKeepWarm keeps them, and switches MIG mode off where
// no partition of ours is left. It is called at the start and when a driver is found.
// A failure on one GPU doesn't stop the others; Run retries it. Without hardware it
// does nothing.
func (m *Manager) Recover(ctx context.Context) error {
	return m.tidyAll(ctx, "recover", limits{warm: true})
}

// LeaveHost destroys all idle partitions and switches the modes back: of ours, only
// partitions of claims stay.
func (m *Manager) LeaveHost(ctx context.Context) error {
	return m.tidyAll(ctx, "leave", limits{})
}

// Run destroys partitions that nobody has used for as long as SetKeepWarm says,
// switches MIG mode off some seconds after the last partition of ours is gone,
// and retries failures. It returns when the context has ended and operations in
// progress are done.
func (m *Manager) Run(ctx context.Context) {
	sweep := func(ctx context.Context, uuid gpu.UUID) error {
		return m.tidy(ctx, "sweep", uuid, limits{warm: true, linger: modeLinger})
	}
	m.worker.Sweep(ctx, sweep, func(log klog.Logger, uuid gpu.UUID, err error) {
		log.Error(err, "Idle MIG partitions stay for now; it is tried again", "gpu", uuid)
	})
}

// limits are what tidy leaves.
type limits struct {
	// warm: partitions without a claim stay for the time of SetKeepWarm.
	warm bool
	// linger is how long MIG mode may stay on without a partition of ours.
	linger time.Duration
}

// tidyAll tidies all GPUs that have a record, at once.
func (m *Manager) tidyAll(ctx context.Context, op string, l limits) error {
	var uuids []gpu.UUID
	for _, r := range m.cfg.Journal.GPUs() {
		uuids = append(uuids, r.GPU)
	}
	for _, u := range m.cfg.Journal.UnreadableGPUs() {
		uuids = append(uuids, u.GPU)
	}
	return agenda.Each(uuids, func(uuid gpu.UUID) error { return m.tidy(ctx, op, uuid, l) })
}

// tidy destroys the partitions of a GPU beyond the limits. A failure is scheduled for a retry.
func (m *Manager) tidy(ctx context.Context, op string, uuid gpu.UUID, l limits) (err error) {
	defer wrap(&err, "tidy the MIG partitions of GPU %s", uuid)
	return m.worker.Tried(uuid, m.tidyNow(ctx, op, uuid, l))
}

// tidyNow destroys incomplete partitions, and those idle for longer than the
// limits allow, and then switches the mode off.
func (m *Manager) tidyNow(ctx context.Context, op string, uuid gpu.UUID, l limits) (err error) {
	v, err := m.visit(ctx, op, uuid)
	if err != nil {
		return err
	}
	defer v.end(&err)
	if r, ok := m.cfg.Journal.GPU(uuid); ok && r.BootID != m.cfg.BootID {
		return m.cfg.Journal.DeleteGPU(uuid) // the hardware has forgotten, whether or not the GPU is still there
	}
	if err := v.look(); err != nil {
		return err
	}
	if v.unreadable != "" {
		return errors.New(v.unreadable)
	}
	var keepWarm time.Duration
	if l.warm {
		keepWarm = m.keep(uuid)
	}
	if err := errors.Join(v.destroyIdle(ctx, keepWarm), v.save()); err != nil {
		return err
	}
	if v.switched && len(v.ours)+len(v.others) == 0 && v.emptyFor() >= l.linger {
		if err := errors.Join(v.switchMode(ctx, false), v.save()); err != nil {
			return err
		}
	}
	v.schedule()
	return nil
}

// destroyIdle destroys incomplete partitions, and those that have been idle for
// that long.
func (v *visit) destroyIdle(ctx context.Context, keepWarm time.Duration) error {
	var errs []error
	for _, o := range slices.Clone(v.ours) {
		if o.complete() && (v.m.describeClaimOn(o.Partition) != "" || v.idleFor(o.Partition) < keepWarm) {
			continue
		}
		errs = append(errs, v.destroy(ctx, o))
	}
	return errors.Join(errs...)
}

// idlest returns those of ours that no claim holds, the longest idle first.
func (v *visit) idlest() []own {
	var idle []own
	for _, o := range v.ours {
		if o.instance != nil && v.m.describeClaimOn(o.Partition) == "" {
			idle = append(idle, o)
		}
	}
	slices.SortStableFunc(idle, func(a, b own) int { return int(v.idleFor(b.Partition) - v.idleFor(a.Partition)) })
	return idle
}
