package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// Ensure returns the instance that the partition is, which a claim holds in the
// journal already. It is made unless it is there: one of ours is used again,
// and one that others made, if it has the same profile and place, is used as it
// is and never destroyed. Where the mode is off it is switched on. Idle
// partitions of ours in the way, or using the engines that this one needs, are
// destroyed. Idempotent; a partition that has vanished is created again.
//
// If the hardware refuses, or something of others is in the way, it returns a gpu.RefusedError.
// The caller tries a second time: a monitor, say, may have kept the GPU from being changed for a
// moment.
//
// After an error, Release or Run destroys an incomplete partition.
func (m *Manager) Ensure(ctx context.Context, p gpu.Partition) (_ gpu.Instance, err error) {
	defer wrap(&err, "make %s", named(p))
	v, err := m.visit(ctx, "make", p.GPU)
	if err != nil {
		return gpu.Instance{}, err
	}
	defer v.end(&err)
	defer v.schedule()
	v.want = p
	if err := v.look(); err != nil {
		return gpu.Instance{}, err
	}
	if err := v.readSwitched(); err != nil {
		return gpu.Instance{}, err
	}
	v.setIdle(p, false)
	if i, ok := v.at(p); ok && i.UUID != "" {
		return i, v.save()
	}
	if v.unreadable != "" {
		return gpu.Instance{}, errors.New(v.unreadable)
	}
	if err := v.mayCreate(p); err != nil {
		return gpu.Instance{}, err
	}
	if err := v.makeRoom(ctx, p); err != nil {
		return gpu.Instance{}, errors.Join(err, v.save())
	}
	return v.create(ctx, p)
}

// Find returns the instance that the partition is, whoever made it. It changes
// nothing; an error where there is no such instance.
func (m *Manager) Find(ctx context.Context, p gpu.Partition) (_ gpu.Instance, err error) {
	defer wrap(&err, "find %s", named(p))
	v, err := m.visit(ctx, "find", p.GPU)
	if err != nil {
		return gpu.Instance{}, err
	}
	defer v.end(&err)
	if err := v.look(); err != nil {
		return gpu.Instance{}, err
	}
	if err := v.readSwitched(); err != nil {
		return gpu.Instance{}, err
	}
	if i, ok := v.at(p); ok && i.UUID != "" {
		return i, nil
	}
	return gpu.Instance{}, ErrNoDevice
}

// mayCreate is an error where something that isn't ours to change stands in the
// way of the partition.
func (v *visit) mayCreate(p gpu.Partition) error {
	for _, i := range v.others {
		if i.Placement.Overlaps(p.Placement) {
			return v.refused(fmt.Errorf("%s, which Tessera didn't create, is in the way: find out who created it and destroy it (nvidia-smi mig -i %s -dci -gi %d; nvidia-smi mig -i %s -dgi -gi %d)",
				instanceName(i), v.uuid, i.GPUInstanceID, v.uuid, i.GPUInstanceID))
		}
	}
	for _, o := range v.ours {
		if o.Partition != p && o.complete() && o.Placement.Overlaps(p.Placement) {
			if holder := v.m.describeClaimOn(o.Partition); holder != "" {
				return fmt.Errorf("%w: %s is in the way, and %s holds it: delete that claim's pods, or delete this pod so that its claim is allocated again", ErrHeld, instanceName(*o.instance), holder)
			}
		}
	}
	switch {
	case v.mig.Enabled != v.mig.Pending:
		return v.refused(errors.New("a change of the GPU's MIG mode is pending: reset the GPU (nvidia-smi --gpu-reset) or reboot the node, or undo the change (nvidia-smi -mig)"))
	case !v.mig.Enabled && !v.mig.Switchable:
		return v.refused(fmt.Errorf("MIG mode is off, and Tessera may not switch it on this GPU (before Hopper it takes a reset, in a virtual machine it is the hypervisor's): switch it on (nvidia-smi -i %s -mig 1, then reset the GPU)", v.uuid))
	}
	return nil
}

// makeRoom destroys what is idle or half made in the partition's place.
func (v *visit) makeRoom(ctx context.Context, p gpu.Partition) error {
	for _, o := range slices.Clone(v.ours) {
		if !o.Placement.Overlaps(p.Placement) {
			continue
		}
		if err := v.destroy(ctx, o); err != nil {
			return fmt.Errorf("make room: %w", err)
		}
	}
	return nil
}

// create makes a partition in a place where nothing is: intent, effect, result.
func (v *visit) create(ctx context.Context, p gpu.Partition) (gpu.Instance, error) {
	v.ours = append(v.ours, own{Partition: p})
	wasOn := v.mig.Enabled
	v.switched = v.switched || !wasOn
	if err := v.save(); err != nil {
		return gpu.Instance{}, err
	}
	v.m.cfg.Steps.Reached("partition.intended")
	if !wasOn {
		if err := v.switchMode(ctx, true); err != nil {
			return gpu.Instance{}, errors.Join(err, v.failed(p, err))
		}
	}
	made, err := v.createOrEvict(ctx, p)
	if err != nil {
		unsettled := v.failed(p, err)
		return gpu.Instance{}, errors.Join(v.judge(ctx, v.explain(err)), unsettled)
	}
	v.m.cfg.Steps.Reached("partition.created")
	v.ours[v.ownIndex(p)].instance = &made
	if err := v.save(); err != nil {
		return gpu.Instance{}, err
	}
	v.m.cfg.Steps.Reached("partition.made")
	return made, nil
}

// createOrEvict makes the instance. While the GPU lacks what it needs, such as
// an engine, idle ones of ours are destroyed, the longest idle first.
func (v *visit) createOrEvict(ctx context.Context, p gpu.Partition) (gpu.Instance, error) {
	idle := v.idlest()
	for {
		if err := context.Cause(ctx); err != nil {
			return gpu.Instance{}, err
		}
		began := time.Now()
		made, err := v.hw.CreateInstance(p)
		v.changed(ctx, "create", began, err, "profile", p.Profile, "start", p.Placement.Start)
		if !errors.Is(err, nvml.ErrInsufficientResources) || len(idle) == 0 {
			return made, err
		}
		if evictErr := v.destroy(ctx, idle[0]); evictErr != nil {
			return gpu.Instance{}, errors.Join(err, fmt.Errorf("make room: %w", evictErr))
		}
		idle = idle[1:]
	}
}

// failed resolves the intent after a failure. An instance at its placement is
// ours, created and not undone, and the next visit destroys it; unless there
// was no room, because then another program has created it.
func (v *visit) failed(p gpu.Partition, cause error) error {
	if errors.Is(cause, nvml.ErrInsufficientResources) {
		v.forget(p)
	}
	have := v.record()
	began := time.Now()
	mig, err := v.hw.MIG(v.uuid)
	v.measure("look", began, err)
	if err != nil {
		return nil //nolint:nilerr // the intent stays in the record; the next visit looks again
	}
	v.mig = mig
	v.sortOut(have)
	return v.save()
}

// explain adds the existing instances to an error about missing room.
func (v *visit) explain(err error) error {
	if !errors.Is(err, nvml.ErrInsufficientResources) {
		return err
	}
	return fmt.Errorf("%w: another instance, or missing engines, leave no room; there are %s", err, v.describe())
}

// describe lists all instances that look has found, and who has them.
func (v *visit) describe() string {
	var list []string
	for _, o := range v.ours {
		if o.instance == nil {
			continue
		}
		who := "idle"
		if h := v.m.describeClaimOn(o.Partition); h != "" {
			who = "held by " + h
		}
		list = append(list, fmt.Sprintf("%s (%s)", instanceName(*o.instance), who))
	}
	for _, i := range v.others {
		list = append(list, instanceName(i)+" (not made by Tessera)")
	}
	return join(list)
}
