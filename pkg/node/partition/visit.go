package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/tessera-dra/tessera/pkg/gpu"
	"github.com/tessera-dra/tessera/pkg/node/holding"
	"github.com/tessera-dra/tessera/pkg/nvml"
)

// visit is one operation on one GPU, with its lock held.
type visit struct {
	m    *Manager
	op   string
	uuid gpu.UUID
	hw   Hardware
	*onGPU
	unlock func()
	began  time.Time
	// want is what a claim is to be given: a Whole or a Partition; nil: nothing.
	want gpu.Device
	// inHardware is the time spent there.
	inHardware time.Duration

	// The results of look.
	mig    gpu.MIG
	ours   []own
	others []gpu.Instance
	// switched: MIG mode is on because we switched it, or are about to.
	switched bool
	// unreadable says why the GPU's record can't be read, "" if it can.
	unreadable string
}

// own is a partition in the GPU's record that is there.
type own struct {
	gpu.Partition
	// instance is nil from the moment of the intent until it is made.
	instance *gpu.Instance
}

// complete reports whether the partition is there completely.
func (o own) complete() bool { return o.instance != nil && o.instance.UUID != "" }

// visit takes a GPU's lock for an operation, which ends with visit.end.
func (m *Manager) visit(ctx context.Context, op string, uuid gpu.UUID) (*visit, error) {
	unlock, err := m.worker.Lock(ctx, []gpu.UUID{uuid})
	if err != nil {
		return nil, err
	}
	// A release succeeds without a driver, too: the partition is destroyed when there is one.
	if m.hw == nil && op != "release" {
		unlock()
		return nil, gpu.ErrNoDriver
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gpus[uuid] == nil {
		m.gpus[uuid] = &onGPU{idle: map[gpu.Partition]time.Time{}}
	}
	return &visit{m: m, op: op, uuid: uuid, hw: m.hw, onGPU: m.gpus[uuid], unlock: unlock, began: time.Now()}, nil
}

// end gives the GPU's lock back, and observes how long the operation took with all but the
// hardware.
func (v *visit) end(err *error) {
	v.m.metrics.own.WithLabelValues(v.op, result(*err)).Observe((time.Since(v.began) - v.inHardware).Seconds())
	v.unlock()
}

// wrap says in an operation's error what was to be done, with which GPU or partition.
func wrap(err *error, format string, object any) {
	if *err != nil {
		*err = fmt.Errorf(format+": %w", object, *err)
	}
}

// schedule has Run come back when something of ours is due to go.
func (v *visit) schedule() {
	for _, o := range v.ours {
		v.scheduleOwn(o)
	}
	switch {
	case !v.switched || len(v.ours) > 0:
		v.empty = time.Time{}
	case len(v.others) > 0: // the mode stays on for their sake
		v.scheduleIn(retryLast)
	default:
		v.scheduleIn(modeLinger - v.emptyFor())
	}
}

// scheduleOwn is schedule for one of our partitions; a claim's partition is scheduled
// when the claim releases it.
func (v *visit) scheduleOwn(o own) {
	keep := v.m.keep(v.uuid)
	switch {
	case o.instance == nil:
	case v.m.describeClaimOn(o.Partition) == "":
		v.scheduleIn(keep - v.idleFor(o.Partition))
	case v.isIdle(o.Partition): // released, and the claim's record is about to go
		v.scheduleIn(max(keep-v.idleFor(o.Partition), retryFirst))
	case slices.ContainsFunc(v.m.cfg.Journal.ClaimsOn(v.uuid), holding.Claim.IsUnreadable): // whose claims release what their names tell, and that may not be all
		v.scheduleIn(retryLast)
	}
}

func (v *visit) scheduleIn(wait time.Duration) { v.m.worker.At(v.uuid, time.Now().Add(wait)) }

// look reads the hardware and divides the instances into ours and others'. A
// record of another boot is ignored.
func (v *visit) look() error {
	r, ok := v.m.cfg.Journal.GPU(v.uuid)
	if !ok || r.BootID != v.m.cfg.BootID {
		r = holding.GPURecord{}
	}
	// A recorded instance that doesn't exist is dropped from the record, so the hardware is
	// read twice.
	for look := 0; look == 0 || look == 1 && ok && !equal(v.record(), r); look++ {
		began := time.Now()
		mig, err := v.hw.MIG(v.uuid)
		v.measure("look", began, err)
		if err != nil {
			return err
		}
		v.mig = mig
		v.sortOut(r)
	}
	if v.unreadable = v.damage(); v.unreadable == "" || !v.isClean() {
		return nil
	}
	if err := v.m.cfg.Journal.DeleteGPU(v.uuid); err != nil {
		return err
	}
	v.unreadable = ""
	v.m.cfg.Facts.Reread()
	return nil
}

// damage says why the GPU's record can't be read, "" if it can.
func (v *visit) damage() string {
	for _, u := range v.m.cfg.Journal.UnreadableGPUs() {
		if u.GPU == v.uuid {
			return unreadable(u)
		}
	}
	return ""
}

// readSwitched reads the number of the device node, which a switch of the MIG mode may have
// changed, if that is still to be done. The GPU, or a part of it, is given to no claim before.
func (v *visit) readSwitched() error {
	if !v.unread {
		return nil
	}
	minor, err := v.hw.Minor(v.uuid)
	if err == nil {
		err = v.m.cfg.Specs.SetMinor(v.uuid, minor)
	}
	if err != nil {
		return fmt.Errorf("read what switching the MIG mode has changed: %w", err)
	}
	v.unread = false
	return nil
}

// isClean reports whether nothing that a record could tell of is left: no instance,
// and no mode that we may have switched on.
func (v *visit) isClean() bool {
	return !v.mig.Enabled || v.mig.Pending && !v.mig.Switchable && len(v.mig.Instances) == 0
}

// sortOut compares the record with the hardware. It drops partitions that no
// longer exist, and intents without an instance.
func (v *visit) sortOut(r holding.GPURecord) {
	v.ours, v.others = nil, slices.Clone(v.mig.Instances)
	for _, made := range r.Partitions {
		is := func(i gpu.Instance) bool { return agrees(made, i) }
		if n := slices.IndexFunc(v.others, is); n >= 0 {
			i := v.others[n]
			v.ours = append(v.ours, own{Partition: partitionOf(v.uuid, made.Partition), instance: &i})
			v.others = slices.Delete(v.others, n, n+1)
		}
	}
	v.switched = r.ModeSwitched && v.mig.Enabled
}

// agrees reports whether an instance is the one in a record. Of an intent,
// profile and place are known, and that nothing was there before. One whose
// compute instance is gone is still the one: a destruction ended half way.
func agrees(made holding.MadePartition, i gpu.Instance) bool {
	if i.Profile != made.Profile || i.Placement != (gpu.Placement{Start: made.Start, Size: made.Size}) {
		return false
	}
	if made.Made == nil {
		return true
	}
	return i.GPUInstanceID == made.Made.GPUInstanceID &&
		(i.ComputeInstanceID == gpu.NoComputeInstance || i.ComputeInstanceID == made.Made.ComputeInstanceID && i.UUID == made.Made.UUID)
}

func partitionOf(uuid gpu.UUID, p holding.Partition) gpu.Partition {
	return gpu.Partition{GPU: uuid, Profile: p.Profile, Placement: gpu.Placement{Start: p.Start, Size: p.Size}}
}

// save makes the record durable, if that is needed. A GPU on which nothing is
// ours has none. One that can't be read is left alone.
func (v *visit) save() error {
	want := v.record()
	have, ok := v.m.cfg.Journal.GPU(v.uuid)
	switch {
	case v.unreadable != "" || ok && equal(have, want):
		return nil
	case len(want.Partitions) == 0 && !want.ModeSwitched:
		return v.m.cfg.Journal.DeleteGPU(v.uuid)
	default:
		err := v.m.cfg.Journal.PutGPU(want)
		v.m.note(want)
		return err
	}
}

// record returns the GPU's record for the journal.
func (v *visit) record() holding.GPURecord {
	r := holding.GPURecord{GPU: v.uuid, BootID: v.m.cfg.BootID, ModeSwitched: v.switched}
	for _, o := range v.ours {
		r.Partitions = append(r.Partitions, made(o))
	}
	return r
}

// made returns the record's entry of a partition.
func made(o own) holding.MadePartition {
	m := holding.MadePartition{Partition: holding.PartitionOf(o.Partition)}
	if i := o.instance; i != nil {
		m.Made = &holding.MadeInstance{GPUInstanceID: i.GPUInstanceID, ComputeInstanceID: i.ComputeInstanceID, UUID: i.UUID}
	}
	return m
}

func equal(a, b holding.GPURecord) bool {
	same := func(a, b holding.MadePartition) bool {
		return a.Partition == b.Partition && (a.Made == nil) == (b.Made == nil) && (a.Made == nil || *a.Made == *b.Made)
	}
	return a.BootID == b.BootID && a.ModeSwitched == b.ModeSwitched && slices.EqualFunc(a.Partitions, b.Partitions, same)
}

// findOwn finds the partition among ours.
func (v *visit) findOwn(p gpu.Partition) (own, bool) {
	n := v.ownIndex(p)
	if n < 0 {
		return own{}, false
	}
	return v.ours[n], true
}

func (v *visit) ownIndex(p gpu.Partition) int {
	return slices.IndexFunc(v.ours, func(o own) bool { return o.Partition == p })
}

// other finds the partition among what others made.
func (v *visit) other(p gpu.Partition) (gpu.Instance, bool) {
	n := slices.IndexFunc(v.others, func(i gpu.Instance) bool { return i.Profile == p.Profile && i.Placement == p.Placement })
	if n < 0 {
		return gpu.Instance{}, false
	}
	return v.others[n], true
}

// at finds the partition, whoever made it.
func (v *visit) at(p gpu.Partition) (gpu.Instance, bool) {
	if o, ok := v.findOwn(p); ok && o.instance != nil {
		return *o.instance, true
	}
	return v.other(p)
}

// forget takes the partition out of ours.
func (v *visit) forget(p gpu.Partition) {
	v.ours = slices.DeleteFunc(v.ours, func(o own) bool { return o.Partition == p })
	v.setIdle(p, false)
}

// destroy destroys an instance of ours, which look has just seen.
func (v *visit) destroy(ctx context.Context, o own) error {
	if o.instance != nil {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		began := time.Now()
		err := v.hw.DestroyInstance(v.uuid, *o.instance)
		v.changed(ctx, "destroy", began, err, "profile", o.Profile, "start", o.Placement.Start, "instance", o.instance.UUID)
		if err != nil && !v.isGone(err, o) {
			return v.judge(ctx, err)
		}
		v.m.cfg.Steps.Reached("partition.destroyed")
	}
	v.forget(o.Partition)
	return nil
}

// isGone reports whether an instance that couldn't be destroyed isn't there any
// more, neither completely nor in part.
func (v *visit) isGone(err error, o own) bool {
	if !errors.Is(err, nvml.ErrNotFound) {
		return false
	}
	began := time.Now()
	now, err := v.hw.MIG(v.uuid)
	v.measure("look", began, err)
	return err == nil && !slices.ContainsFunc(now.Instances, func(i gpu.Instance) bool { return agrees(made(o), i) })
}

// switchMode switches the mode that is, or becomes, ours to switch.
func (v *visit) switchMode(ctx context.Context, on bool) error {
	v.unread = true // after an error, too, the mode may have been switched
	if err := context.Cause(ctx); err != nil {
		return err
	}
	began := time.Now()
	err := v.hw.SetMIGMode(v.uuid, on)
	v.changed(ctx, "mode", began, err, "on", on)
	if err != nil {
		return v.judge(ctx, err)
	}
	v.m.cfg.Steps.Reached("partition.switched")
	v.mig.Enabled, v.mig.Pending, v.switched = on, on, on
	return v.readSwitched()
}

// setIdle says that a partition is idle from now on, or isn't.
func (v *visit) setIdle(p gpu.Partition, idle bool) {
	if !idle {
		delete(v.idle, p)
	} else if !v.isIdle(p) {
		v.idle[p] = time.Now()
	}
}

// isIdle reports whether the partition was said to be idle.
func (v *visit) isIdle(p gpu.Partition) bool {
	_, idle := v.idle[p]
	return idle
}

// idleFor returns how long the partition, which no claim holds, has been idle;
// if that is unknown, it counts from now on.
func (v *visit) idleFor(p gpu.Partition) time.Duration {
	v.setIdle(p, true)
	return time.Since(v.idle[p])
}

// emptyFor is how long a GPU whose mode we switched has had no partition of
// ours; from now on where that was not known.
func (v *visit) emptyFor() time.Duration {
	if v.empty.IsZero() {
		v.empty = time.Now()
	}
	return time.Since(v.empty)
}

// changed observes and logs an operation of the hardware that changes the GPU.
func (v *visit) changed(ctx context.Context, op string, began time.Time, err error, about ...any) {
	took := v.measure(op, began, err)
	klog.FromContext(ctx).V(2).Info("MIG "+op, append(about, "gpu", v.uuid, "duration", took, "err", err)...)
}

// measure observes an operation of the hardware.
func (v *visit) measure(op string, began time.Time, err error) time.Duration {
	took := time.Since(began)
	v.inHardware += took
	v.m.metrics.hardware.WithLabelValues(op, result(err)).Observe(took.Seconds())
	return took
}

// result is the label of an outcome.
func result(err error) string {
	switch {
	case err == nil:
		return "success"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "stopped"
	case errors.Is(err, nvml.ErrInUse):
		return "in_use"
	case errors.Is(err, nvml.ErrInsufficientResources):
		return "no_room"
	case errors.Is(err, nvml.ErrLost):
		return "lost"
	default:
		return "error"
	}
}
